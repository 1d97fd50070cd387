"""Code of users on their model: it sees and does what it would without fastgen, whatever path a call takes.

A call is exact or left to the host. The cases are in `foreign_zoo.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import harness
import pytest
import torch
import transformers
import zoo
from foreign_zoo import CASES, SEARCHES, SEED, Case, Counting, Seen, User, namespaces, observe, options_of, state_of
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.versions import CACHE

# Of each case every search, or two, on its first model, and one on each of the others.
GRID = [
    pytest.param(case, family, search, id=f"{name}-{family}-{search}")
    for number, (name, case) in enumerate(CASES.items())
    for place, family in enumerate(case.families)
    for search in case.some_searches(number, place)
]


def assert_same(stock: Any, ours: Any, what: str = "") -> None:
    """Equal, and tensors of floating point but for rounding."""
    if isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor) and stock.dtype == ours.dtype, f"{what}: {ours}"
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")
    elif isinstance(stock, dict):
        assert stock.keys() == ours.keys(), f"{what}: {stock.keys() ^ ours.keys()}"
        for key in stock:
            assert_same(stock[key], ours[key], f"{what} {key}")
    else:
        assert stock == ours, f"{what}: {stock} became {ours}"


def assert_same_seen(stock: Seen, ours: Seen) -> None:
    for theirs, mine in zip(stock.outputs, ours.outputs, strict=True):
        harness.assert_same(theirs, mine)
    assert_same(stock.log, ours.log, "what the user's code saw")
    assert_same(stock.state, ours.state, "state")
    assert torch.equal(stock.stream, ours.stream), "the random stream goes on elsewhere"
    assert interception.current() is None


def assert_path(case: Case, seen: Seen) -> None:
    assert len(seen.calls) == len(seen.outputs), "not every call is on record"
    for call in seen.calls:
        if case.expected == "accelerated":
            assert call.tier in harness.TIERS, f"left to the host: {call.reason}"
        elif case.expected == "stock":
            assert call.tier == "stock", f"ran in the {call.tier} tier"
        if call.tier == "stock":
            assert call.reason
            names = [*case.names, *seen.touched] if case.expected == "stock" else [""]
            assert any(name in call.reason for name in names), f"{names} are not in {call.reason!r}"


@pytest.mark.parametrize("case, family, search", GRID)
def test_case(case: Case, family: str, search: str) -> None:
    stock = observe(case.build, family, search, is_accelerated=False)
    ours = observe(case.build, family, search, is_accelerated=True)
    assert_same_seen(stock, ours)
    assert_path(case, ours)


# ---------------------------------------------------------------------------------------------- trials, if asked for
def test_the_default_is_not_to_try() -> None:
    assert fastgen.config.current().foreign_code == "stock"
    with pytest.raises(ValueError, match="foreign_code"):
        fastgen.configure(foreign_code="perhaps")


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["adapters_written_by_hand", "wrapping_module", "traced_module", "weight_norm"])
def test_what_a_trial_finds_equal_is_accelerated(name: str, search: str) -> None:
    build = CASES[name].build
    stock = observe(build, "llama", search, is_accelerated=False)
    ours = observe(build, "llama", search, is_accelerated=True, foreign_code="trial")
    assert_same_seen(stock, ours)
    assert all(call.tier in harness.TIERS for call in ours.calls), [call.reason for call in ours.calls]


@pytest.mark.parametrize("name", ["adds_a_vector_to_each_row", "drawing_module"])
def test_what_a_trial_finds_different_stays_and_the_trial_leaves_nothing(name: str) -> None:
    """The user's modules, buffers and random stream are as without fastgen.

    What a hook writes elsewhere is left there: who asks for a trial has the hook called in the trial too.
    """
    build = CASES[name].build
    stock = observe(build, "llama", "beams", is_accelerated=False)
    ours = observe(build, "llama", "beams", is_accelerated=True, foreign_code="trial")
    if name == "adds_a_vector_to_each_row":
        assert len(ours.log) > len(stock.log)
        stock, ours = (dataclasses.replace(seen, log=[]) for seen in (stock, ours))
    assert_same_seen(stock, ours)
    assert all(call.tier == "stock" and call.reason for call in ours.calls)


def test_a_trial_does_not_count() -> None:
    """What is accelerated after a trial has called the user's module once for each step, and not once more."""

    def calls(is_accelerated: bool, **settings: Any) -> tuple[int, list[Tensor]]:
        seen = observe(CASES["counting_module"].build, "llama", "beams", is_accelerated, **settings)
        return int(seen.state["model.layers.0.mlp", "_buffers", "calls"]), seen.outputs

    stock, ours = calls(False), calls(True, foreign_code="trial")
    assert ours[0] == stock[0]
    for theirs, mine in zip(stock[1], ours[1], strict=True):
        harness.assert_same(theirs, mine)


# ---------------------------------------------------------------------------------------------- exceptions
class OwnError(Exception):
    pass


class OwnInterrupt(BaseException):
    pass


ERRORS = (StopIteration, GeneratorExit, KeyboardInterrupt, MemoryError, SystemExit, OwnInterrupt, OwnError)


class Raising:
    """Raise an exception at one of its calls."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class Streamer:
    def __init__(self, put: Callable[[], None], end: Callable[[], None]) -> None:
        self._put, self._end = put, end

    def put(self, value: Tensor) -> None:
        self._put()

    def end(self) -> None:
        self._end()


def _after(function: Callable[..., Any], raising: Raising) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        raising()
        return function(*args, **kwargs)

    return wrapped


Placed = tuple[dict[str, Any], Callable[[], None]]  # arguments of `generate`, and what takes it off the model again


def _from_hook(user: User, raising: Raising) -> Placed:
    return {}, user.part("mlp").register_forward_hook(lambda *_: raising()).remove


def _from_encoder_hook(user: User, raising: Raising) -> Placed:
    return {}, user.part("encoder_mlp").register_forward_hook(lambda *_: raising()).remove


def _from_forward(user: User, raising: Raising) -> Placed:
    mlp = user.part("mlp")
    mlp.forward = _after(mlp.forward, raising)
    return {}, lambda: delattr(mlp, "forward")


def _from_inputs(user: User, raising: Raising) -> Placed:
    user.model.prepare_inputs_for_generation = _after(user.model.prepare_inputs_for_generation, raising)
    return {}, lambda: delattr(user.model, "prepare_inputs_for_generation")


def _from_processor(user: User, raising: Raising) -> Placed:
    return dict(logits_processor=LogitsProcessorList([_after(lambda ids, scores: scores, raising)])), _nothing


def _from_criterion(user: User, raising: Raising) -> Placed:
    criterion = _after(lambda ids, scores: torch.zeros(ids.shape[0], dtype=torch.bool), raising)
    return dict(stopping_criteria=StoppingCriteriaList([criterion])), _nothing


def _from_put(user: User, raising: Raising) -> Placed:
    return dict(streamer=Streamer(raising, _nothing)), _nothing


def _from_end(user: User, raising: Raising) -> Placed:
    raising.at = 1
    return dict(streamer=Streamer(_nothing, raising)), _nothing


def _from_prefixes(user: User, raising: Raising) -> Placed:
    words = list(range(zoo.VOCAB))
    return dict(prefix_allowed_tokens_fn=_after(lambda sentence, tokens: words, raising)), _nothing


def _nothing() -> None:
    pass


PLACES = [
    (_from_hook, "llama", "greedy beams"),
    (_from_hook, "bart", "beams"),
    (_from_encoder_hook, "bart", "greedy beams"),
    (_from_forward, "llama", "greedy beams"),
    (_from_inputs, "llama", "greedy beams"),
    (_from_inputs, "bart", "samples"),
    (_from_processor, "llama", "greedy samples beams"),
    (_from_processor, "bart", "greedy beams"),
    (_from_criterion, "llama", "greedy beams"),
    (_from_put, "llama", "greedy"),
    (_from_end, "llama", "greedy"),
    (_from_prefixes, "llama", "greedy beams"),
]


@pytest.mark.parametrize(
    "place, family, search",
    [
        pytest.param(place, family, search, id=f"{place.__name__[1:]}-{family}-{search}")
        for place, family, searches in PLACES
        for search in searches.split()
    ],
)
def test_an_exception_of_the_users_comes_out_as_it_is(place: Any, family: str, search: str) -> None:
    """The same object, whatever its class; and the next call is as if nothing had happened."""
    user, inputs = User(family), zoo.inputs_for(family)
    options = dict(SEARCHES[search], max_new_tokens=6, eos_token_id=None)
    if search == "samples" or place is _from_put:  # a streamer is for one sentence
        inputs = zoo.inputs_for(family, batch=1)
    if place is _from_end:
        inputs = zoo.inputs_for(family, batch=1)
    expected = harness.run_stock(user.model, inputs, **options)
    with fastgen.disabled():
        before, state = namespaces(user.model), state_of(user.model)

    def outcome(kind: type[BaseException], at: int) -> tuple[bool, Any, int]:
        raising = Raising(kind("mine"), at)
        own, take_off = place(user, raising)
        torch.manual_seed(SEED)
        try:
            found = user.model.generate(**inputs, **options, **own)
        except BaseException as error:
            return error is raising.error, (type(error), error.__cause__), raising.calls
        finally:
            take_off()
        return False, found, raising.calls

    steps = (1,) if place in (_from_encoder_hook, _from_end) else (1, 5)
    for kind in ERRORS:
        for at in steps:
            with fastgen.disabled():
                stock = outcome(kind, at)
            assert stock[0], f"stock answers {kind.__name__} with {stock[1]}"
            ours = outcome(kind, at)
            assert ours == stock, f"{kind.__name__} at call {at}: {ours} instead of {stock}"
            assert interception.current() is None
        output, calls = harness.run_fastgen(user.model, inputs, **options)
        harness.assert_same(expected, output)
        harness.assert_path(calls, "auto", "accelerated")
    with fastgen.disabled():
        assert namespaces(user.model) == before
    assert_same(state, state_of(user.model))


# ---------------------------------------------------------------------------------------------- after a call
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5"])
def test_copies_of_a_model_that_was_accelerated(family: str) -> None:
    """An accelerated call leaves nothing on the model: copies are as large as before, and are accelerated too."""
    model, inputs = copy.deepcopy(zoo.load(family)), zoo.inputs_for(family)
    for module in model.modules():
        module._forward_hooks.clear()  # the host's, if another test has asked for hidden states: none can be pickled

    def size() -> int:
        file = io.BytesIO()
        torch.save(model, file)
        return file.tell()

    stock = harness.run_stock(model, inputs, **options_of("beams"))
    before = state_of(model), size(), len(pickle.dumps(model))
    for search in SEARCHES:
        _, calls = harness.run_fastgen(model, inputs, **options_of(search))
        harness.assert_path(calls, "auto", "accelerated")
    assert_same(before[0], state_of(model))
    assert before[1:] == (size(), len(pickle.dumps(model)))
    for another in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output, calls = harness.run_fastgen(another, inputs, **options_of("beams"))
        harness.assert_path(calls, "auto", "accelerated")
        harness.assert_same(stock, output)


def test_a_model_copied_with_its_hooks() -> None:
    """What was put on a model after an accelerated call, and copied with it, is found on the copy."""
    user, inputs, options = User("llama"), zoo.inputs_for("llama"), options_of("beams")
    harness.compare(user.model, inputs, **options)
    user.part("mlp").register_forward_hook(user.hook(lambda output: output * 1.1))
    for model in (user.model, copy.deepcopy(user.model)):
        user.log.clear()
        stock, log = harness.run_stock(model, inputs, **options), list(user.log)
        user.log.clear()
        output, calls = harness.run_fastgen(model, inputs, strict=False, **options)
        harness.assert_same(stock, output)
        harness.assert_path(calls, "auto", "fallback")
        assert user.log == log


def test_what_comes_and_goes_between_calls() -> None:
    """Each call is judged by what is on the model then."""
    user, inputs, options = User("bart"), zoo.inputs_for("bart"), options_of("beams")
    for _ in range(2):
        harness.compare(user.model, inputs, **options)
        handle = user.part("mlp").register_forward_hook(user.hook(lambda output: output * 1.1))
        harness.compare(user.model, inputs, expected="fallback", **options)
        handle.remove()
        harness.compare(user.model, inputs, **options)
        own = user.replace("mlp", Counting)
        harness.compare(user.model, inputs, expected="fallback", **options)
        user.replace("mlp", lambda _, own=own: own.base)


@pytest.mark.parametrize("kind", [Mock, functools.lru_cache])
def test_a_hook_that_is_an_object_of_the_standard_library(kind: Any) -> None:
    """A mock calls whatever it was given, here something that sees the number of rows."""
    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama")

    def effect(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * (1 + 0.05 * output.shape[0])

    hook = Mock(side_effect=effect) if kind is Mock else functools.lru_cache(lambda module, args, output: output * 1.1)
    model.model.layers[0].mlp.register_forward_hook(hook)
    harness.compare(model, inputs, expected="fallback", **options_of("beams"))


def test_a_verdict_is_of_the_code_that_was_tried() -> None:
    """Another hook in the same place is tried anew."""
    model, inputs, options = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama"), options_of("beams")
    part, expected = model.model.layers[0].mlp, []
    for hook in (lambda m, a, x: x * 1.1, lambda m, a, x: x * (1 + 0.05 * x.shape[0]), lambda m, a, x: x * 0.9):
        handle = part.register_forward_hook(hook)
        stock = harness.run_stock(model, inputs, **options)
        with harness.configured(foreign_code="trial", strict=False):
            ours, calls = harness.run_fastgen(model, inputs, strict=False, **options)
        harness.assert_same(stock, ours)
        expected.append(calls[-1].tier != "stock")
        handle.remove()
    assert expected == [True, False, True]


def _on_all_modules(monkeypatch: pytest.MonkeyPatch, part: Any, change: Any) -> Callable[[], None]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return change(output) if type(module) is type(part) else output  # a trial runs a copy of the model

    return torch.nn.modules.module.register_module_forward_hook(hook).remove


def _in_torch(monkeypatch: pytest.MonkeyPatch, part: Any, change: Any) -> Callable[[], None]:
    silu = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: change(silu(x)))
    return monkeypatch.undo


def _in_attention(monkeypatch: pytest.MonkeyPatch, part: Any, change: Any) -> Callable[[], None]:
    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(module, query, *args, **kwargs)
        return change(output), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
    return monkeypatch.undo


@pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 looks attention up in another way")
@pytest.mark.parametrize("place", [_on_all_modules, _in_torch, _in_attention])
def test_a_verdict_is_of_the_code_around_the_model(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, options = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama"), options_of("beams")
    expected = []
    for change in (lambda x: x * 1.1, lambda x: x * (1 + 0.05 * x.shape[0]), lambda x: x * 0.9):
        remove = place(monkeypatch, model.model.layers[0].mlp, change)
        stock = harness.run_stock(model, inputs, **options)
        with harness.configured(foreign_code="trial", strict=False):
            ours, calls = harness.run_fastgen(model, inputs, strict=False, **options)
        harness.assert_same(stock, ours)
        expected.append(calls[-1].tier != "stock")
        remove()
    assert expected == [True, False, True]


def test_a_hook_on_all_modules_that_is_removed() -> None:
    """Its model is accelerated again."""
    model, inputs, options = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama"), options_of("beams")
    for _ in range(2):
        harness.compare(model, inputs, **options)
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
        harness.compare(model, inputs, expected="fallback", **options)
        handle.remove()
        harness.compare(model, inputs, **options)


def test_a_search_replaced_before_fastgen_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs: the host is left alone, and the status says why."""
    calls, model = [], zoo.load("llama")
    fastgen.disable()
    try:
        search = GenerationMixin._beam_search

        @functools.wraps(search)
        def mine(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(self)
            return search(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(GenerationMixin, "_beam_search", mine)
            with pytest.warns(
                RuntimeWarning, match="_beam_search has been replaced by code that is not transformers's"
            ):
                fastgen.enable()
            model.generate(**zoo.inputs_for("llama"), **options_of("beams"))
            assert len(calls) == 1
            assert "has been replaced" in str(fastgen.status())
            fastgen.disable()
    finally:
        fastgen.enable()
    harness.compare(zoo.load("llama"), zoo.inputs_for("llama"), **options_of("beams"))


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_training_between_calls(family: str) -> None:
    model, inputs = copy.deepcopy(zoo.load(family)).requires_grad_(True), zoo.inputs_for(family)
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        outputs.append(harness.compare(model, inputs, **options_of("beams")).sequences)
        harness.compare(model.train(), inputs, expected="fallback", **options_of("greedy"))
        assert "training" in fastgen.status().calls[-1].reason
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    assert not all(output.equal(outputs[0]) for output in outputs), "training has changed nothing"


# ---------------------------------------------------------------------------------------------- threads
def test_a_model_with_hooks_beside_a_plain_one() -> None:
    hooked, plain = User("llama"), User("llama")
    hooked.part("layer").register_forward_hook(hooked.hook())
    hooked.part("mlp").register_forward_hook(hooked.hook(lambda output: output * 1.1))
    inputs, options, rounds = zoo.inputs_for("llama"), options_of("beams"), 6
    stock = [harness.run_stock(user.model, inputs, **options) for user in (hooked, plain)]
    assert not torch.equal(*stock)
    log, errors, barrier = list(hooked.log), [], threading.Barrier(2)

    def work(user: User, expected: Tensor) -> None:
        try:
            barrier.wait()
            for _ in range(rounds):
                user.log.clear()
                assert torch.equal(user.model.generate(**inputs, **options), expected)
                assert user.log == (log if user is hooked else [])
        except BaseException as error:
            errors.append(error)

    report.reset()
    threads = [threading.Thread(target=work, args=pair) for pair in zip((hooked, plain), stock, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors, errors
    tiers = [call.tier for call in fastgen.status().calls]
    assert tiers.count("stock") == rounds and tiers.count("fast") == rounds, tiers


# ---------------------------------------------------------------------------------------------- other callers
class Runtime(GenerationMixin):
    """What runs a model in another format has the host's `generate`, and is no module."""

    main_input_name, base_model_prefix, _is_stateful = "input_ids", "", False

    def __init__(self, model: Any) -> None:
        self.session, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype
        self.generation_config = copy.deepcopy(model.generation_config)
        self.log: list[Any] = []

    def can_generate(self) -> bool:
        return True

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, Any]:
        return {}  # which newer versions ask for

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        self.log.append(tuple(input_ids.shape))
        kwargs = {name: kwargs.get(name) for name in (CACHE, "use_cache", "position_ids")}
        return self.session(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    __call__ = forward


@pytest.mark.parametrize("search", SEARCHES)
def test_a_class_that_is_no_module(search: str) -> None:
    model, inputs = Runtime(zoo.load("llama")), zoo.inputs_for("llama")
    stock = harness.run_stock(model, inputs, **options_of(search))
    log = list(model.log)
    model.log.clear()
    output, calls = harness.run_fastgen(model, inputs, strict=False, **options_of(search))
    harness.assert_same(stock, output)
    assert model.log == log
    assert len(calls) == 1 and (calls[0].tier in harness.TIERS or calls[0].reason)


@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_labels_that_the_host_drops(family: str) -> None:
    """As evaluation loops hand a whole batch to `generate`."""
    inputs = zoo.inputs_for(family)
    without = harness.run_stock(zoo.load(family), inputs, **options_of("beams"))
    for search in SEARCHES:
        found = harness.compare(
            zoo.load(family), inputs, labels=inputs["input_ids"].clone(), **options_of(search)
        ).sequences
        assert search != "beams" or torch.equal(found, without)


def test_attention_that_reaches_everywhere() -> None:
    """LED's `global_attention_mask`, which its encoder reads."""
    model, inputs, options = zoo.load("led"), zoo.inputs_for("led"), options_of("beams")
    reach = torch.zeros_like(inputs["input_ids"])
    reach[:, 0] = 1
    stock = harness.run_stock(model, inputs, global_attention_mask=reach, **options)
    assert not torch.equal(stock, harness.run_stock(model, inputs, **options)), "the mask changes nothing"
    output, calls = harness.run_fastgen(model, inputs, strict=False, global_attention_mask=reach, **options)
    harness.assert_same(stock, output)
    assert len(calls) == 1 and (calls[0].tier in harness.TIERS or calls[0].reason)


# ---------------------------------------------------------------------------------------------- images
def _florence2() -> Any:
    text = dict(zoo.ENCODER_DECODER, model_type="bart", vocab_size=99, init_std=0.3)
    vision = dict(
        embed_dim=[8, 16, 16, 32],
        num_heads=[2] * 4,
        num_groups=[2] * 4,
        depths=[1] * 4,
        window_size=4,
        patch_size=[7, 3, 3, 3],
        patch_stride=[4, 2, 2, 2],
        patch_padding=[3, 1, 1, 1],
        drop_path_rate=0.0,
        patch_prenorm=[False, True, True, True],
        projection_dim=32,
        max_temporal_embeddings=10,
        max_position_embeddings=10,
    )
    torch.manual_seed(0)
    config = transformers.Florence2Config(
        image_token_id=5, text_config=text, vision_config=vision, is_encoder_decoder=True
    )
    return transformers.Florence2ForConditionalGeneration(config).eval()


@pytest.mark.skipif(not hasattr(transformers, "Florence2Config"), reason="this transformers has no Florence-2")
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("has_images", [True, False])
def test_florence2(search: str, has_images: bool) -> None:
    """Its preparation hands no tensor to the encoder's, but embeddings: of images and text, or of text alone."""
    model = _florence2()
    ids = torch.tensor([[5, 5, 20, 30, 40], [5, 5, 21, 31, 41]])  # an image's patch, and the mean of its patches
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if has_images:
        inputs["pixel_values"] = torch.rand(2, 3, 32, 32)
    else:
        inputs["input_ids"] = ids.clamp(min=10)
    options = dict(options_of(search), eos_token_id=None)
    stock = harness.run_stock(model, inputs, **options)
    assert not torch.equal(stock[0], stock[-1]), "all sentences are the same"
    output, calls = harness.run_fastgen(model, inputs, strict=False, **options)
    harness.assert_same(stock, output)
    assert len(calls) == 1 and (calls[0].tier in harness.TIERS or calls[0].reason)


# ---------------------------------------------------------------------------------------------- what is returned
def facts_of(cache: Any) -> dict[str, Any]:
    """What a cache that was returned says of itself, and how large masks for one more token are."""
    facts: dict[str, Any] = {"sliding": cache.is_sliding, "length": cache.get_seq_length()}
    for number, layer in enumerate(cache.layers):
        most = getattr(layer, "get_max_length", None) or layer.get_max_cache_shape  # its older name
        facts[f"layer {number}"] = (
            tuple(layer.keys.shape),
            tuple(layer.values.shape),
            layer.is_sliding,
            most(),
            cache.get_mask_sizes(1, number),
        )
    return facts


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_what_the_returned_cache_says_of_itself(family: str, search: str) -> None:
    """Of sliding windows too: stock keeps their last positions alone."""
    if zoo.MAJOR < 5:
        pytest.skip("caches of this version have other methods")
    model, inputs = zoo.load(family), zoo.inputs_for(family)
    options = dict(options_of(search), return_dict_in_generate=True)
    stock = getattr(harness.run_stock(model, inputs, **options), CACHE)
    output, calls = harness.run_fastgen(model, inputs, **options)
    harness.assert_path(calls, "auto", "accelerated")
    ours = getattr(output, CACHE)
    assert facts_of(ours) == facts_of(stock)
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert isinstance(mine, type(theirs))
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
