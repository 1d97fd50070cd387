"""Runs a call by the host, too, and compares the outputs: see `fastgen.optimizer.verification`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria

from fastgen.optimizer import verification
from fastgen.optimizer.transformers import judge
from fastgen.optimizer.transformers.expansion import containers_copied
from fastgen.optimizer.transformers.request import Request

_HOST = "transformers"
_KINDS = {
    judge.SAME: verification.SAME,
    judge.NEAR_TIE: verification.NEAR_TIE,
    judge.DIFFERENT: verification.DIFFERENT,
}


@dataclass(frozen=True)
class Search:
    """A search that ran over the tree, with what a comparison needs."""

    model: Any
    beams: int  # 1: greedy search or samples
    reason: str | None  # why the call cannot be compared
    facts: dict[str, Any]


def note(request: Request, tier: str) -> None:
    """Note an accelerated search for the call of `generate` that contains it, if calls are verified."""
    if not verification.is_on():
        return
    reason = None
    if request.calls_back or request.streamer is not None:
        reason = "with code of yours between the steps"
    elif request.users_cache is not None:
        reason = "with a cache of yours, which they change"
    elif any(isinstance(criterion, MaxTimeCriteria) for criterion in request.stopping_criteria):
        reason = "that a time limit may end"
    elif request.diverse is not None:
        reason = "of diverse beam search, which this version does not have"
    beams = int(request.generation_config.num_beams) if request.is_beam_search else 1
    options = request.generation_config.to_diff_dict()
    facts = {
        "model": f"{type(request.model).__name__}, {request.model.dtype}, {request.input_ids.device}, tier {tier}",
        "input_ids": tuple(request.input_ids.shape),
        "options": verification.plain({name: value for name, value in options.items() if not name.startswith("_")}),
    }
    verification.note_accelerated(Search(request.model, beams, reason, facts))


def run(stock: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `stock`, the host's `generate`, with accelerated searches; if a comparison is due, compare with the host."""
    if not verification.is_on():
        return stock(model, *args, **kwargs)
    again = {name: _copied(value, model) for name, value in _named(stock, model, args, kwargs).items()}
    before = verification.RandomState(_device_of(model))
    with verification.watching() as seen:
        output = stock(model, *args, **kwargs)
    if not seen:
        return output
    search = seen[0]
    reason = search.reason if len(seen) == 1 and search.model is model else "with several searches in one"
    if not verification.is_due(model):
        return output
    if reason:
        verification.note(verification.UNVERIFIED, reason)
        return output
    return _compared(stock, model, again, before, search, output)


def _compared(
    stock: Callable[..., Any],
    model: Any,
    kwargs: dict[str, Any],
    before: verification.RandomState,
    search: Search,
    output: Any,
) -> Any:
    def call(more: dict[str, Any], **settings: Any) -> Any:
        with verification.comparing(**settings):
            before.restore()
            return stock(model, **{**{name: _copied(value, model) for name, value in kwargs.items()}, **more})

    def judged(theirs: Any) -> tuple[str, str]:
        verdict = judge.judged(
            lambda **more: call(more, tier="stock") if more else theirs,
            lambda **more: call(more) if more else output,
            search.beams,
            _half(model),
        )
        return _KINDS[verdict.kind], verdict.why

    question = verification.Question(_HOST, model, before, search.facts)
    return question.answer(output, lambda: call({}, tier="stock"), judged)


def _half(model: Any) -> str:
    """The name of the linear layers' dtype if it is one of half precision, else ""."""
    device, dtype = _device_of(model).type, model.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    name = str(dtype).removeprefix("torch.")
    return name if name in judge.HALF_TOLERANCE else ""


def _device_of(model: Any) -> torch.device:
    return torch.device(getattr(model, "device", "cpu"))


def _named(stock: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments but the model, by name."""
    names = list(inspect.signature(stock).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _copied(value: Any, model: Any) -> Any:
    """Copy an argument that `generate` may change: a dictionary, such as the encoder output, or the host's processors,
    some of which have a state. The user's processors are not copied: such calls are not compared."""
    if isinstance(value, dict):
        return containers_copied(value)
    if isinstance(value, (LogitsProcessorList, StoppingCriteriaList)) and all(
        type(each).__module__.startswith("transformers.") for each in value
    ):
        return copy.deepcopy(value, {id(model): model})
    return value
