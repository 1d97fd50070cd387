"""The host's processors and criteria whose `__call__` a user has replaced: the replacement is what counts, and it is
called as often as by stock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import transformers
import zoo
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from fastgen.optimizer.transformers import replaced_processors, versions
from fastgen.optimizer.transformers.generate import diverse_beam_search

BEAMS = dict(num_beams=3, num_return_sequences=2)
GREEDY: dict[str, Any] = {}
SAMPLES = dict(do_sample=True, num_return_sequences=2)
# A class of the host, the options that make use of it, and the searches.
PROCESSORS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "NoRepeatNGramLogitsProcessor": (dict(no_repeat_ngram_size=2), [BEAMS, GREEDY, SAMPLES]),
    "MinNewTokensLengthLogitsProcessor": (dict(min_new_tokens=4), [BEAMS, GREEDY, SAMPLES]),
    "MinLengthLogitsProcessor": (dict(min_length=6), [BEAMS, GREEDY]),
    "SuppressTokensLogitsProcessor": (dict(suppress_tokens=[5, 6, 7]), [BEAMS, GREEDY]),
    "SuppressTokensAtBeginLogitsProcessor": (dict(begin_suppress_tokens=[5, 6, 7]), [BEAMS]),
    "RepetitionPenaltyLogitsProcessor": (dict(repetition_penalty=1.3), [BEAMS, GREEDY]),
    "TopKLogitsWarper": (dict(top_k=5), [SAMPLES, {**SAMPLES, "top_p": 0.9}]),
    "TopPLogitsWarper": (dict(top_p=0.8), [SAMPLES]),
    "TemperatureLogitsWarper": (dict(temperature=0.6), [SAMPLES]),
    "LogitNormalization": (dict(renormalize_logits=True), [BEAMS]),
    "PrefixConstrainedLogitsProcessor": (
        dict(prefix_allowed_tokens_fn=lambda sentence, tokens: [5, 6, 7, 8, 9]),
        [BEAMS, GREEDY],
    ),
}
EACH = [
    pytest.param(name, options | search, id=f"{name}-{number}")
    for name, (options, searches) in PROCESSORS.items()
    for number, search in enumerate(searches)
]


def nudged(calls: list[int], original: Any, self: Any, input_ids: Any, scores: Any) -> Any:
    """In place of what the processor does: even tokens are likelier after odd ones."""
    calls.append(input_ids.shape[1])
    return scores + 0.7 * (torch.arange(scores.shape[-1]) % 2 != input_ids[:, -1:] % 2)


def wrapped(calls: list[int], original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bears the original's names, as good wrappers do."""
    calls.append(args[0].shape[1])
    found = original(self, *args, **kwargs)
    return found if found.dtype == torch.bool else torch.where(found.isneginf(), -5.0, found)


def replace(monkeypatch: pytest.MonkeyPatch, kind: type, how: Callable[..., Any]) -> list[int]:
    """The lengths at which it is called."""
    calls: list[int] = []
    original = kind.__call__

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return how(calls, original, self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", replacement)
    return calls


def both(
    calls: list[int], model: Any, inputs: dict[str, Any], is_left: bool = False, **options: Any
) -> tuple[Any, list[int]]:
    """Tokens, equal on both sides, and the lengths at which stock calls. `is_left`: the call is left to the host."""
    options |= dict(return_dict_in_generate=False)
    stock, by_stock = harness.run_stock(model, inputs, **options), calls.copy()
    calls.clear()
    found, reports = harness.run_fastgen(model, inputs, strict=not is_left, **options)
    assert torch.equal(stock, found)
    assert {call.tier for call in reports} <= ({"stock"} if is_left else {"fast", "compat"}), reports
    return stock, by_stock


@pytest.mark.parametrize("how", [nudged, wrapped])
@pytest.mark.parametrize("name", ["bart", "llama"])
@pytest.mark.parametrize(("kind", "options"), EACH)
def test_processors(
    kind: str, options: dict[str, Any], name: str, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load(name)
    inputs = zoo.text(model, seed=3)
    calls = replace(monkeypatch, getattr(logits_process, kind), how)
    _, by_stock = both(calls, model, inputs, max_new_tokens=9, **options)
    assert calls == by_stock and calls


@pytest.mark.parametrize("search", [BEAMS, GREEDY, SAMPLES])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_list_of_processors(name: str, search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load(name)
    inputs = zoo.text(model, seed=3)
    calls = replace(monkeypatch, LogitsProcessorList, nudged)
    _, by_stock = both(calls, model, inputs, max_new_tokens=9, no_repeat_ngram_size=2, **search)
    assert calls == by_stock and calls


@pytest.mark.parametrize("how", [nudged, wrapped])
@pytest.mark.parametrize("kind", ["PrefixConstrainedLogitsProcessor", "SequenceBiasLogitsProcessor"])
def test_beams_in_groups(kind: str, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """There the class of a processor tells how many rows it is for, and whether it comes before the penalty."""
    allowed = dict(prefix_allowed_tokens_fn=lambda sentence, tokens: [5 + sentence, 7, 8, 9, 10, 11])
    options = allowed if kind.startswith("Prefix") else dict(sequence_bias=[[[6], 2.0], [[7, 8], -3.0]])
    options |= dict(num_beams=6, num_beam_groups=3, diversity_penalty=0.7, num_return_sequences=4, max_new_tokens=9)
    options |= dict(return_dict_in_generate=False, no_repeat_ngram_size=2)
    # Newer versions of the host have no loop for this: then stock runs ours over the host's cache.
    has_none = not hasattr(transformers, "BeamSearchScorer")
    loop = dict(custom_generate=diverse_beam_search.group_beam_search) if has_none else {}
    calls = replace(monkeypatch, getattr(logits_process, kind), how)
    model = zoo.load("bart")
    inputs = zoo.text(model, seed=3)
    stock, by_stock = harness.run_stock(model, inputs, **options, **loop), calls.copy()
    calls.clear()
    found, _ = harness.run_fastgen(model, inputs, strict=has_none, **options)
    assert torch.equal(stock, found) and calls == by_stock and calls


def wrapped_criterion(calls: list[int], original: Any, self: Any, input_ids: Any, *args: Any) -> Any:
    calls.append(input_ids.shape[1])
    return original(self, input_ids, *args)


def stops_at_length(length: int, calls: list[int], original: Any, self: Any, input_ids: Any, *args: Any) -> Any:
    calls.append(input_ids.shape[1])
    stops = input_ids.shape[1] >= length
    return torch.full(input_ids.shape[:1], stops, dtype=torch.bool) | original(self, input_ids, *args)


@pytest.mark.parametrize("kind", ["MaxLengthCriteria", "EosTokenCriteria", "StoppingCriteriaList"])
@pytest.mark.parametrize("search", [BEAMS, GREEDY, SAMPLES])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_criteria(name: str, search: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load(name)
    inputs = zoo.text(model, seed=3)
    prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    how = functools.partial(stops_at_length, prompt + 4)
    calls = replace(monkeypatch, getattr(stopping_criteria, kind), how)
    # Without beams the criteria alone say how long a text may be.
    is_left = kind == "MaxLengthCriteria" and search is not BEAMS
    tokens, _ = both(calls, model, inputs, is_left, max_new_tokens=9, **search)
    assert tokens.shape[1] == prompt + 4 and calls


LISTS: dict[str, type] = {
    "processors": LogitsProcessorList,
    "criteria": StoppingCriteriaList,
    "length": stopping_criteria.MaxLengthCriteria,
}


@pytest.mark.parametrize("search", [BEAMS, GREEDY, SAMPLES])
@pytest.mark.parametrize("replaced", LISTS)
@pytest.mark.parametrize("family", zoo.BY_ROWS)
def test_a_trial_does_not_call_them(
    family: str, replaced: str, search: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first call such a model is tried, and that search is not the user's."""
    model = zoo.fresh(family)
    inputs = zoo.inputs_for(family)
    calls = replace(monkeypatch, LISTS[replaced], nudged if replaced == "processors" else wrapped_criterion)
    is_left = not versions.PREFILLS or (replaced == "length" and search is not BEAMS)  # see `test_criteria`
    options = dict(min_new_tokens=9, max_new_tokens=9, no_repeat_ngram_size=2) | search
    _, by_stock = both(calls, model, inputs, is_left, **options)
    first = calls.copy()
    calls.clear()
    harness.run_fastgen(model, inputs, strict=not is_left, **options)
    assert first == calls and set(first) <= set(by_stock) and first


def test_what_is_the_hosts_own_stays_as_it_is() -> None:
    processors = LogitsProcessorList([logits_process.TopKLogitsWarper(5)])
    criteria = StoppingCriteriaList([stopping_criteria.MaxLengthCriteria(5)])
    assert replaced_processors.marked(processors) is processors
    assert replaced_processors.marked(criteria) is criteria


def test_what_stands_for_a_replaced_one_passes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To `isinstance` and by attributes: the list looks for the largest length so."""
    kind = stopping_criteria.MaxLengthCriteria
    replace(monkeypatch, kind, wrapped)
    found = replaced_processors.marked(StoppingCriteriaList([kind(5)]))
    assert isinstance(found[0], kind) and type(found[0]) is not kind
    assert found.max_length == found[0].max_length == 5
