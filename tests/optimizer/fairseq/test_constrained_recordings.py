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


CHANGES = [_in_place, _other_storage, _other_parameter, _normalisation]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_change_in_the_middle(change: Callable[[Any], None]) -> None:
    with judge.configured(packing="always"):
        unchanged, stock = run_both("pre-norm")[0], None
        stock, found, model = run_both("pre-norm", change)
    judge.assert_same(stock, found)
    with pytest.raises(AssertionError):
        judge.assert_same(unchanged, stock)
    assert statistics.counts(model).replays > 2, "nothing was replayed before it"


@pytest.mark.parametrize("change", CHANGES[1:], ids=lambda change: change.__name__[1:])
def test_the_look_before_each_step_is_what_tells(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedReplayer, "is_current", lambda self: True)
    with pytest.raises(AssertionError):
        stock, found, _ = run_both("pre-norm", change)
        judge.assert_same(stock, found)
