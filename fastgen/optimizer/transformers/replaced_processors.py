"""The host's logits processors and stopping criteria whose code somebody has replaced: they are called as they are,
like those of a user, and nothing is concluded from their class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from fastgen.patching.replaced_code import is_replaced


class Replaced:
    """Stands for one of them."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for `isinstance`; `type` tells the difference
        return type(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "original":  # asked for while a copy is made
            raise AttributeError(name)
        return getattr(self.original, name)


class _Processors(LogitsProcessorList):
    """A list whose own code is replaced."""


class _Criteria(StoppingCriteriaList):
    """A list whose own code is replaced."""


_LISTS = {LogitsProcessorList: _Processors, StoppingCriteriaList: _Criteria}


def marked(found: Any) -> Any:
    """The host's list of processors or criteria; if code was replaced, a new list, in which such code is not taken for
    the host's."""
    kind = type(found)
    if kind not in _LISTS:
        return found
    is_own = not is_replaced(kind, "__call__")
    ones = [Replaced(one) if _is_replaced(one) else one for one in found]
    if is_own and not any(type(one) is Replaced for one in ones):
        return found
    return (kind if is_own else _LISTS[kind])(ones)


def original_of(one: Any) -> Any:
    """What one of `marked` stands for, where its class tells what it is, and its code is called in any case."""
    return one.original if type(one) is Replaced else one


class _InTurn(LogitsProcessorList):
    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        for one in self:
            scores = one(input_ids, scores)
        return scores


class _UpToLength(StoppingCriteriaList):
    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        is_full = input_ids.shape[1] >= self[0].max_length
        return torch.full(input_ids.shape[:1], is_full, device=input_ids.device, dtype=torch.bool)


def for_a_trial(processors: Iterable[Any], length: int) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
    """Our own processors, and the criterion that ends rows of `length` tokens, for a search that the user has not asked
    for: code that the user has put in place of the host's does not see it."""
    lists = _InTurn if is_replaced(LogitsProcessorList, "__call__") else LogitsProcessorList
    is_own = not is_replaced(StoppingCriteriaList, "__call__") and not is_replaced(MaxLengthCriteria, "__call__")
    criteria = StoppingCriteriaList if is_own else _UpToLength
    return lists(processors), criteria([MaxLengthCriteria(max_length=length)])


def _is_replaced(one: Any) -> bool:
    kind = type(one)
    return kind.__module__.partition(".")[0] == "transformers" and is_replaced(kind, "__call__")
