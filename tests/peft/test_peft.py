"""Models with PEFT's adapters: the same tokens and the same state as without fastgen, whatever path a call takes.

Adapters that are merged and taken off leave the host's own model, which has to be accelerated.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

peft = pytest.importorskip("peft", reason="PEFT is not installed")

import foreign_zoo  # noqa: E402, needs torch
import harness  # noqa: E402
import torch  # noqa: E402
import zoo  # noqa: E402
from foreign_zoo import SEARCHES  # noqa: E402
from packaging.version import Version  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.integrations.peft import MIN_PEFT_VERSION  # noqa: E402

import fastgen  # noqa: E402
from fastgen import report  # noqa: E402

# An older one hands prefixes over by a name that the host does not look at any more, and may not load adapters itself.
WANTS_NEWER = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers wants PEFT {MIN_PEFT_VERSION} or later",
)

TASKS = dict(llama="CAUSAL_LM", bart="SEQ_2_SEQ_LM", t5="SEQ_2_SEQ_LM")
ATTENTION = dict(llama=["q_proj", "v_proj"], bart=["q_proj", "v_proj"], t5=["q", "v"])
FEEDFORWARD = dict(llama=["down_proj"], bart=["fc2"], t5=["wo"])

Config = Callable[[str], Any]  # of a family


def _config(kind: str, **options: Any) -> Config:
    def build(family: str) -> Any:
        targets = ATTENTION[family] + FEEDFORWARD[family]
        return getattr(peft, kind)(**{"task_type": TASKS[family], "target_modules": targets, **options})

    return build


def _prompt(kind: str, **options: Any) -> Config:
    return lambda family: getattr(peft, kind)(task_type=TASKS[family], num_virtual_tokens=4, **options)


def _ia3(family: str) -> Any:
    targets = ATTENTION[family] + FEEDFORWARD[family]
    return peft.IA3Config(
        task_type=TASKS[family], target_modules=targets, feedforward_modules=FEEDFORWARD[family], init_ia3_weights=False
    )


METHODS: dict[str, Config] = {
    "lora": _config("LoraConfig", r=4),
    "lora_in_few_layers": _config("LoraConfig", r=2, layers_to_transform=[1]),
    "lora_everywhere": _config("LoraConfig", r=2, target_modules="all-linear", modules_to_save=["lm_head"]),
    "lora_on_embeddings": _config("LoraConfig", r=2, target_modules=["embed_tokens", "shared"]),
    "dora": _config("LoraConfig", r=4, use_dora=True),
    "adalora": _config("AdaLoraConfig", init_r=4, target_r=2, total_step=10),
    "ia3": _ia3,
    "loha": _config("LoHaConfig", r=2),
    "lokr": _config("LoKrConfig", r=2),
    "oft": _config("OFTConfig", r=0, oft_block_size=4),
    "vera": _config("VeraConfig", r=4, target_modules=None),
    "ln_tuning": lambda family: peft.LNTuningConfig(task_type=TASKS[family]),
    "prefix": _prompt("PrefixTuningConfig"),
    "prompt": _prompt("PromptTuningConfig"),
    "p_tuning": _prompt("PromptEncoderConfig", encoder_hidden_size=16),
}
ON_THREE = ("lora", "dora", "ia3", "prefix", "prompt")


def _stirred(model: Any) -> Any:
    """Give what an adapter would learn, which often begins at zero, something to do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def build(family: str, method: str) -> Any:
    torch.manual_seed(0)
    model = copy.deepcopy(zoo.load(family))
    return _stirred(peft.get_peft_model(model, METHODS[method](family))).eval()


@contextlib.contextmanager
def _side(is_accelerated: bool) -> Iterator[None]:
    report.reset()
    with contextlib.nullcontext() if is_accelerated else fastgen.disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def generated(model: Any, family: str, search: str, batch: int = 3, **options: Any) -> Any:
    torch.manual_seed(foreign_zoo.SEED)
    inputs = zoo.inputs_for(family, batch=batch)
    return model.generate(**inputs, **{**foreign_zoo.options_of(search), "max_new_tokens": 8, **options})


def assert_same_state(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert stock.keys() == ours.keys(), stock.keys() ^ ours.keys()
    for key, value in stock.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4)
        else:
            assert ours[key] == value, f"{key}: {value} became {ours[key]}"


def assert_exact(calls: tuple[report.Call, ...], expected: int) -> None:
    assert len(calls) == expected, "not every call is on record"
    for call in calls:
        assert call.tier in harness.TIERS or (call.tier == "stock" and call.reason), call


GRID = [
    pytest.param(
        family, method, search, id=f"{method}-{family}-{search}", marks=[WANTS_NEWER] if method == "prefix" else []
    )
    for number, method in enumerate(METHODS)
    for place, family in enumerate(TASKS if method in ON_THREE else ["llama"])
    for search in (SEARCHES if place == 0 and method in ON_THREE else [list(SEARCHES)[(number + place) % 3]])
]


@pytest.mark.parametrize("family, method, search", GRID)
def test_method(family: str, method: str, search: str) -> None:
    """One sentence, with all that can be returned, and three with padding."""

    def run(is_accelerated: bool) -> tuple[list[Any], dict[str, Any], tuple[report.Call, ...]]:
        model = build(family, method)
        before = foreign_zoo.namespaces(model)
        details = dict(return_dict_in_generate=True, output_scores=True)
        outputs = [generated(model, family, search, 1, **details), generated(model, family, search)]
        assert foreign_zoo.namespaces(model) == before, "something is left behind in classes and modules"
        return outputs, foreign_zoo.state_of(model), report.calls()

    with _side(False):
        outputs, state, _ = run(False)
        bare = generated(zoo.load(family), family, search)
    assert outputs[1].shape != bare.shape or not torch.equal(outputs[1], bare), "the adapter changes nothing"
    with _side(True):
        ours = run(True)
    for theirs, mine in zip(outputs, ours[0], strict=True):
        harness.assert_same(theirs, mine)
    assert_same_state(state, ours[1])
    assert_exact(ours[2], 2)


# ---------------------------------------------------------------------------------------------- from call to call
Told = list[tuple[str, Tensor, str]]  # what was done, the tokens that followed, and the tier


def told(story: Callable[[Callable[[str, Any], None]], None], is_accelerated: bool) -> Told:
    found: Told = []

    def tell(what: str, output: Tensor) -> None:
        calls = report.calls()
        found.append((what, output, calls[-1].tier if calls else "none"))
        report.reset()

    with _side(is_accelerated):
        story(tell)
    return found


def assert_same_story(story: Callable[[Callable[[str, Any], None]], None]) -> dict[str, str]:
    """Both sides tell the same; returns the tier of each part."""
    stock, ours = told(story, False), told(story, True)
    for (what, theirs, _), (_, mine, tier) in zip(stock, ours, strict=True):
        assert theirs.shape == mine.shape and torch.equal(theirs, mine), f"{what}: {mine} instead of {theirs}"
        assert tier in report.TIERS, f"{what}: no call on record"
    different = {tuple(output.flatten().tolist()) for _, output, _ in stock}
    assert len(different) > 2, "hardly anything that was done changes the tokens"
    return {what: tier for what, _, tier in ours}


@pytest.mark.parametrize(
    "family, search",
    [("llama", "greedy"), ("llama", "samples"), ("llama", "beams"), ("bart", "beams"), ("t5", "greedy")],
)
def test_adapters_that_are_switched_merged_and_taken_off(family: str, search: str) -> None:
    def story(tell: Callable[[str, Any], None]) -> None:
        model = build(family, "lora")
        tell("first adapter", generated(model, family, search))
        model.add_adapter("second", METHODS["lora"](family))
        model.set_adapter("second")
        _stirred(model)
        tell("second adapter", generated(model, family, search))
        with model.disable_adapter():
            tell("disabled", generated(model, family, search))
        model.set_adapter("default")
        tell("first adapter again", generated(model, family, search))
        model.merge_adapter()
        tell("merged", generated(model, family, search))
        model.unmerge_adapter()
        tell("unmerged", generated(model, family, search))
        model.delete_adapter("second")
        merged = copy.deepcopy(model).merge_and_unload()
        tell("merged and taken off", generated(merged, family, search))
        tell("taken off", generated(model.unload(), family, search))

    tiers = assert_same_story(story)
    for what in ("merged and taken off", "taken off"):
        assert tiers[what] in harness.TIERS, f"{what}: ran in the {tiers[what]} tier"


@pytest.mark.parametrize(
    "family, search", [("llama", "greedy"), ("llama", "beams"), ("bart", "beams"), ("bart", "samples")]
)
def test_an_adapter_for_each_row(family: str, search: str) -> None:
    """PEFT repeats the names for beams by hooks that it puts on for the time of a call."""

    def story(tell: Callable[[str, Any], None]) -> None:
        model = build(family, "lora")
        model.add_adapter("second", METHODS["lora"](family))
        model.set_adapter("second")
        _stirred(model)
        for names in (["default", "second", "__base__"], ["second", "__base__", "default"], ["second"] * 3):
            options = {} if search != "samples" else dict(num_return_sequences=1)
            tell(" ".join(names), generated(model, family, search, adapter_names=names, **options))
        tell("second", generated(model, family, search))

    assert_same_story(story)


@pytest.mark.parametrize("method", ["lora", "ia3", pytest.param("prefix", marks=WANTS_NEWER), "prompt"])
def test_training_between_calls(method: str) -> None:
    def story(tell: Callable[[str, Any], None]) -> None:
        model = build("llama", method)
        inputs = zoo.inputs_for("llama")
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
        for step in range(3):
            tell(f"after {step} steps", generated(model, "llama", "beams"))
            model.train()
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
        tell("at last", generated(model, "llama", "greedy"))

    assert_same_story(story)


@WANTS_NEWER
def test_adapters_by_the_hosts_own_methods() -> None:
    """transformers puts PEFT's layers on a model itself: `generate` is then the host's, on the host's class."""

    def story(tell: Callable[[str, Any], None]) -> None:
        torch.manual_seed(0)
        model = copy.deepcopy(zoo.load("llama"))
        model.add_adapter(METHODS["lora"]("llama"), adapter_name="first")
        _stirred(model).eval()
        tell("first", generated(model, "llama", "beams"))
        model.add_adapter(METHODS["lora"]("llama"), adapter_name="second")
        model.set_adapter("second")
        _stirred(model).eval()
        tell("second", generated(model, "llama", "beams"))
        model.disable_adapters()
        tell("none", generated(model, "llama", "beams"))
        model.enable_adapters()
        tell("second again", generated(model, "llama", "greedy"))

    assert_same_story(story)


@pytest.mark.parametrize("family, search", [("llama", "greedy"), ("llama", "samples"), ("bart", "beams")])
def test_a_trial_lets_lora_be_accelerated(family: str, search: str) -> None:
    with _side(False):
        model = build(family, "lora")
        stock, state = generated(model, family, search), foreign_zoo.state_of(model)
    with _side(True), fastgen.configured(foreign_code="trial"):
        model = build(family, "lora")
        ours = generated(model, family, search)
        calls = report.calls()
    harness.assert_same(stock, ours)
    assert_same_state(state, foreign_zoo.state_of(model))
    harness.assert_path(calls, "auto", "accelerated")


@WANTS_NEWER
def test_a_trial_leaves_what_differs() -> None:
    """Prefixes fill the cache before the first token: no trial may end in another answer, or in an error."""
    with _side(False):
        stock = generated(build("llama", "prefix"), "llama", "beams")
    with _side(True), fastgen.configured(foreign_code="trial"):
        ours = generated(build("llama", "prefix"), "llama", "beams")
        assert_exact(report.calls(), 1)
    harness.assert_same(stock, ours)
