"""Greedy search on logits of which only the largest is computed: the same tokens, and whoever looks gets all logits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

import fastgen
from fastgen.layers import linear, packed_weights
from fastgen.optimizer.transformers import versions
from fastgen.replay import statistics

pytestmark = pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")

GREEDY = dict(num_beams=1, do_sample=False, max_new_tokens=14, return_dict_in_generate=False, tier="compat")
# Behind the head comes soft-capping; the generation configuration asks for processors; the host names no head; the
# head is asked for several streams.
UNSCREENED = {"blenderbot", "fsmt", "gemma2", "prophetnet"}


@pytest.fixture(autouse=True)
def _always() -> Iterator[None]:
    if linear._skinny() is None:
        pytest.skip("there is no native operator here")
    packed_weights.release()
    with harness.configured(packing="always", replay="always"):
        yield
    packed_weights.release()


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The outputs of each screened product that was not replayed; not looked at, which no recorded step may."""
    found: list[torch.Tensor] = []
    plan = linear.LinearDispatcher._screened_plan

    def noting(self: Any, layer: Any, rows: Any, skinny: Any) -> Any:
        made = plan(self, layer, rows, skinny)
        product = made.product

        def noted(rows: Any, weights: Any, bias: Any) -> Any:
            output = product(rows, weights, bias)
            found.append(output)
            return output

        made.product = noted
        return made

    monkeypatch.setattr(linear.LinearDispatcher, "_screened_plan", noting)
    return found


def _inputs(family: str, seed: int = 0, **shape: Any) -> dict[str, Any]:
    return {**zoo.inputs_for(family, seed=seed, **shape), **zoo.FAMILIES[family].generate}


@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_families(family: str, screened: list[torch.Tensor]) -> None:
    model = copy.deepcopy(zoo.load(family))
    for seed in (0, 1):
        harness.compare(model, _inputs(family, seed), **GREEDY)
    assert bool(screened) is (family not in UNSCREENED)
    assert not screened or any((output == -torch.inf).any() for output in screened), "no output was left out"


@pytest.mark.parametrize("batch", [1, 3])
def test_a_later_call_replays_them(batch: int, screened: list[torch.Tensor]) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for seed in range(3):
        screened.clear()
        harness.compare(model, _inputs("llama", seed, batch=batch), **GREEDY)
    assert not screened and packed_weights.count() and statistics.counts(model).replays > 20


def _final_bias(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    return {}


def _processor(model: Any) -> dict[str, Any]:
    return {"logits_processor": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.5)])}


def _asks_for(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"return_dict_in_generate": True, **options}


def _sampling(model: Any) -> dict[str, Any]:
    return {"do_sample": True}


def _hook(model: Any) -> dict[str, Any]:
    model.lm_head.register_forward_hook(lambda module, inputs, output: model.seen.append(output.detach().clone()))
    return {}


def _update_of_the_object(model: Any) -> dict[str, Any]:
    update = model._update_model_kwargs_for_generation

    def seeing(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.seen.append(outputs.logits.clone())
        return update(outputs, *args, **kwargs)

    model._update_model_kwargs_for_generation = seeing
    return {}


@pytest.mark.parametrize(
    "change",
    [
        _final_bias,
        _processor,
        _asks_for(output_logits=True),
        _asks_for(output_scores=True),
        _sampling,
        _hook,
        _update_of_the_object,
    ],
)
def test_whoever_looks_gets_all_logits(change: Any, screened: list[torch.Tensor]) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    model.seen = []
    options = {**GREEDY, **change(model)}
    is_foreign = change in (_hook, _update_of_the_object)
    harness.compare(model, _inputs("bart"), expected="fallback" if is_foreign else "accelerated", **options)
    with harness.configured(foreign_code="trial"):
        harness.compare(model, _inputs("bart"), **options)
    assert not screened and all((output > -torch.inf).all() for output in model.seen)


@pytest.mark.parametrize("name", ["__call__", "forward", "_update_model_kwargs_for_generation"])
def test_what_a_class_is_given_instead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of a method that bears its names, put there at any time."""
    model = copy.deepcopy(zoo.load("bart"))
    harness.compare(model, _inputs("bart"), **GREEDY)
    method = getattr(type(model), name)
    seen: list[Any] = []

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = method(self, *args, **kwargs)
        seen.append(getattr(output, "logits", args[0].logits if name.startswith("_update") else None).clone())
        return output

    monkeypatch.setattr(type(model), name, wrapper)
    expected = len(harness.run_stock(model, _inputs("bart"), **{k: v for k, v in GREEDY.items() if k != "tier"})[0])
    stock = list(seen)
    seen.clear()
    harness.run_fastgen(model, _inputs("bart"), strict=False, **GREEDY)
    assert expected and len(seen) == len(stock) and all((logits > -torch.inf).all() for logits in seen)


def test_a_sample_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which fastgen has found in place of the host's: it may look at what it likes."""
    import inspect
    import textwrap

    from transformers.generation import utils

    with fastgen.disabled():
        source = textwrap.dedent(inspect.getsource(utils.GenerationMixin._sample))
    second = source.replace("torch.argmax(next_token_scores, dim=-1)", "next_token_scores.topk(2).indices[:, 1]")
    assert second != source
    names = dict(vars(utils))
    exec(second, names)
    fastgen.disable()
    monkeypatch.setattr(utils.GenerationMixin, "_sample", names["_sample"])
    fastgen.enable()
    try:
        harness.compare(copy.deepcopy(zoo.load("llama")), _inputs("llama"), **GREEDY)
    finally:
        fastgen.disable()
        monkeypatch.undo()
        fastgen.enable()


def test_linear_layers_that_somebody_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = torch.nn.Linear.forward, []

    def counted(self: Any, rows: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(self, rows)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    model = copy.deepcopy(zoo.load("llama"))
    harness.run_stock(model, _inputs("llama"), **{k: v for k, v in GREEDY.items() if k != "tier"})
    wanted = len(calls)
    calls.clear()
    harness.run_fastgen(model, _inputs("llama"), strict=False, **GREEDY)
    assert wanted == len(calls) > 0


def test_one_recording_is_not_for_another_kind_of_call() -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for seed, options in enumerate([{}, {"do_sample": True}, {}, {"return_dict_in_generate": True}, {}]):
        harness.compare(model, _inputs("llama", seed), **{**GREEDY, **options})
        looks = {"return_dict_in_generate": True, "output_logits": True}
        harness.compare(model, _inputs("llama", seed), **{**GREEDY, **looks})


@pytest.mark.parametrize(("batch", "new"), [(1, 12), (2, 13), (12, 14)])
def test_steps_that_are_not_replayed(batch: int, new: int, screened: list[torch.Tensor]) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    with harness.configured(packing="always", replay="off"):
        harness.compare(model, _inputs("llama", batch=batch), **{**GREEDY, "max_new_tokens": new})
        assert {len(output) for output in screened} == {batch}
        screened.clear()
        harness.compare(model, _inputs("llama", batch=batch), **{**GREEDY, "max_new_tokens": 8})
        assert not screened


def test_a_bias_that_comes_later(screened: list[torch.Tensor]) -> None:
    """A recording that screens is not for a model whose logits are no longer the head's products."""
    model = copy.deepcopy(zoo.load("bart"))
    for seed in (0, 1):
        harness.compare(model, _inputs("bart", seed), **GREEDY)
    assert screened
    screened.clear()
    for change in (_final_bias, lambda model: model.final_logits_bias.zero_()):
        change(model)
        for seed in (2, 3):
            harness.compare(model, _inputs("bart", seed), **GREEDY)


def test_weights_that_change_between_calls() -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for step in range(3):
        harness.compare(model, _inputs("llama", step), **GREEDY)
        with torch.no_grad():
            model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(0))


def test_negative_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what is left out were decided by false codes, the comparison would tell."""
    model = copy.deepcopy(zoo.load("llama"))
    codes_of = packed_weights.screening_of

    def false_codes(layer: Any) -> Any:
        codes, scales, errors = codes_of(layer)
        return codes.flip(0).contiguous(), scales, errors * 0

    monkeypatch.setattr(packed_weights, "screening_of", false_codes)
    with pytest.raises(AssertionError):
        harness.compare(model, _inputs("llama"), **GREEDY)


@pytest.mark.parametrize("which", [0, 3, 13])
def test_ends_at_once_later_or_last(which: int, screened: list[torch.Tensor]) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    inputs = _inputs("llama", batch=3, ragged=True)
    whole = zoo.generate(model, harness.request(inputs, {k: v for k, v in GREEDY.items() if k != "tier"}))
    end = int(whole[0, inputs["input_ids"].shape[1] + which])
    harness.compare(model, inputs, **GREEDY, eos_token_id=[end, int(whole[-1, -1])])
    assert screened
