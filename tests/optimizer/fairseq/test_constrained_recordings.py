"""Searches whose tokens a function allows: the function is called as by stock, steps are recorded all the same, and
what the function changes in the model is seen by the next step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen.layers import packed_weights
from fastgen.replay import statistics
from fastgen.replay.guarded import GuardedReplayer

pytestmark = pytest.mark.usefixtures("recording")

STEPS, CHANGED_AT = 14, 8
LONG = dict(beam_size=4, min_len=STEPS, max_len_b=STEPS)
Calls = list[tuple[int, list[int]]]


def generated(name: str, model: Any, allowed: Any, lengths: list[int] | None = None) -> Any:
    strategy = functools.partial(search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=allowed)
    if name in models.LANGUAGE_MODELS:
        return models.prompted(model, strategy=strategy, beam_size=3, min_len=STEPS, max_len_b=STEPS + 6)
    return models.generate(model, models.batch(lengths or [9, 5, 12, 7]), strategy=strategy, **LONG)


def function(calls: Calls, change: Callable[[], None] = lambda: None) -> Any:
    """Notes all calls, and changes something once."""
    lengths: set[int] = set()

    def allowed(sentence: int, tokens: torch.Tensor) -> list[int]:
        calls.append((int(sentence), tokens.tolist()))
        if len(tokens) not in lengths:
            lengths.add(len(tokens))
            if len(lengths) == CHANGED_AT:
                change()
        return [models.EOS, *(word for word in range(4, 41) if (word + int(tokens[-1])) % 3)]

    return allowed


def run_both(name: str, change: Callable[[Any], None] = lambda model: None) -> tuple[Any, Any, Any]:
    found, calls, model = [], [], None
    for run in (judge.stock, lambda run: judge.ours(run)[0]):
        model, noted = copy.deepcopy(models.load(name)), Calls()
        allowed = function(noted, lambda model=model: change(model))
        found.append(run(lambda model=model, allowed=allowed: generated(name, model, allowed)))
        calls.append(noted)
    assert calls[0] == calls[1], "the function was not called as by stock"
    return *found, model


@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "bart", "prophetnet", "lm"])
def test_steps_are_recorded(name: str) -> None:
    stock, found, model = run_both(name)
    judge.assert_same(stock, found)
    counts = statistics.counts(model)
    assert counts.captures >= 1 and counts.replays >= STEPS - 6


def test_a_trie_is_no_code_of_the_users() -> None:
    """It leaves the packed weights in use, too."""
    if packed_weights.unavailable() is not None:
        pytest.skip("no packed products here")
    packed_weights.release()
    random = torch.Generator().manual_seed(2)
    outputs = [torch.randint(4, 41, (STEPS,), generator=random).tolist() for _ in range(60)]
    trie = fastgen.Trie(outputs, eos_token_id=models.EOS)
    model = copy.deepcopy(models.load("post-norm"))
    with judge.configured(packing="always"):
        judge.compare(lambda: generated("post-norm", model, trie))
    assert statistics.counts(model).replays >= STEPS - 6 and packed_weights.count() > 30
    packed_weights.release()


def test_later_calls() -> None:
    model = copy.deepcopy(models.load("post-norm"))
    for number in range(3):
        judge.compare(lambda: generated("post-norm", model, function([])))
        assert statistics.counts(model).captures == 1, number
    judge.compare(lambda: models.generate(model, models.batch(), **LONG))
    assert statistics.counts(model).captures > 1, "a call without the function has a recording of its own"


# ---------------------------------------------------------------------------------------------- changes
def _in_place(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.fc1.weight.data.numpy()[...] *= -1


def _other_storage(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.fc2.weight.data = -layer.fc2.weight.detach()


def _other_parameter(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.fc2.weight = torch.nn.Parameter(-layer.fc2.weight.detach())


def _normalisation(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.final_layer_norm.weight.data = -layer.final_layer_norm.weight.detach()


def _negated(module: Any) -> Any:
    other = copy.deepcopy(module)
    for weight in other.parameters():
        weight.data = -weight.detach()
    return other


def _module(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.fc1 = _negated(layer.fc1)


def _layer(model: Any) -> None:
    """Its attention goes on with the keys and values of the one before, whose copy it is."""
    model.decoder.layers[1] = copy.deepcopy(model.decoder.layers[1])
    model.decoder.layers[1].fc2 = _negated(model.decoder.layers[1].fc2)


CHANGES = [_in_place, _other_storage, _other_parameter, _normalisation, _module, _layer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_in_the_middle(change: Callable[[Any], None]) -> None:
    with judge.configured(packing="always"):
        unchanged, stock = run_both("pre-norm")[0], None
        stock, found, model = run_both("pre-norm", change)
    judge.assert_same(stock, found)
    with pytest.raises(AssertionError):
        judge.assert_same(unchanged, stock)
    assert statistics.counts(model).replays > 2, "nothing was replayed before it"


# ---------------------------------------------------------------------------------------------- other code of users
def _step(generator: Any, between: Callable[[], None]) -> None:
    strategy, step = generator.search, generator.search.step
    strategy.step = lambda *args, **kwargs: (between(), step(*args, **kwargs))[1]


def _update(generator: Any, between: Callable[[], None]) -> None:
    generator.search.update_constraints = lambda *args: between()


def _blocker(generator: Any, between: Callable[[], None]) -> None:
    class Mine(NGramRepeatBlock):
        def forward(self, tokens: Any, lprobs: Any, *sizes: int) -> Any:
            between()
            return lprobs

    generator.repeat_ngram_blocker = Mine(3)


def _language_model(generator: Any, between: Callable[[], None]) -> None:
    generator.lm_model, generator.lm_weight = copy.deepcopy(models.load("lm")), 0.3
    generator.lm_model.decoder.layers[0].fc1.register_forward_pre_hook(lambda module, args: between())


def _prefix(generator: Any, between: Callable[[], None]) -> None:
    inner = generator._prefix_tokens

    def own(*args: Any) -> Any:
        between()
        return inner(*args)

    generator._prefix_tokens = own


PLACES = [_step, _update, _blocker, _language_model, _prefix]


def between_steps(place: Any, change: Callable[[Any, Any], None]) -> tuple[Any, Any, Any, Any]:
    """What stock and we make of a call in which code in this place changes the generator or the model once."""
    found, calls, model = [], [], None
    for run in (judge.stock, lambda run: judge.ours(run)[0]):
        model = copy.deepcopy(models.load("pre-norm"))
        generator = SequenceGenerator([model], models.dictionary(), **LONG)
        count: list[int] = []

        def between(generator: Any = generator, model: Any = model, count: list[int] = count) -> None:
            count.append(1)
            if len(count) == CHANGED_AT:
                change(generator, model)

        place(generator, between)
        sample = models.batch([9, 5, 12, 7])
        prefix = torch.full((4, STEPS), models.PAD) if place is _prefix else None
        found.append(run(lambda g=generator, m=model, s=sample, p=prefix: g.generate([m], s, prefix_tokens=p)))
        calls.append(len(count))
    assert calls[0] == calls[1] >= CHANGED_AT
    return *found, statistics.counts(model), model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[1:])
def test_a_change_in_other_places(place: Any, change: Callable[[Any], None]) -> None:
    with judge.configured(packing="always"):
        unchanged = between_steps(place, lambda generator, model: None)[0]
        stock, found, counts, _ = between_steps(place, lambda generator, model: change(model))
    judge.assert_same(stock, found)
    with pytest.raises(AssertionError):
        judge.assert_same(unchanged, stock)
    assert counts.replays > 2, "nothing was replayed before it"


@pytest.mark.parametrize("place", [_step, _update, _blocker, _language_model], ids=lambda place: place.__name__[1:])
def test_another_temperature(place: Any) -> None:
    """The loop takes it from the generator at each step."""
    unchanged = between_steps(place, lambda generator, model: None)[0]
    stock, found, counts, _ = between_steps(place, lambda generator, model: setattr(generator, "temperature", 2.5))
    judge.assert_same(stock, found)
    with pytest.raises(AssertionError):
        judge.assert_same(unchanged, stock)
    assert counts.replays > 2


def test_another_temperature_from_a_prefix_function() -> None:
    """In a language model it may come while the prompt is read."""
    found = []
    for run in (judge.stock, lambda run: judge.ours(run)[0]):
        generator = SequenceGenerator([models.load("lm")], models.dictionary(), beam_size=3, max_len_b=STEPS)

        def allowed(sentence: int, tokens: torch.Tensor, generator: Any = generator) -> list[int]:
            generator.temperature = 1.0 + len(tokens) // 4
            return [models.EOS, *range(4, 41)]

        generator.search = search.PrefixConstrainedBeamSearch(models.dictionary(), allowed)
        sample = models.prompts()
        prefix = sample["net_input"]["src_tokens"]
        found.append(run(lambda g=generator, s=sample, p=prefix: g.generate([], s, prefix_tokens=p)))
    judge.assert_same(*found)


@pytest.mark.parametrize("change", CHANGES[1:], ids=lambda change: change.__name__[1:])
def test_the_look_before_each_step_is_what_tells(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedReplayer, "is_current", lambda self: True)
    with pytest.raises(AssertionError):
        stock, found, _ = run_both("pre-norm", change)
        judge.assert_same(stock, found)
