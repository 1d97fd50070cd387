"""Samples drawn in the host's own loop, without a random number for tokens that were ruled out.

Of the scores the host takes `softmax`, and of that `torch.multinomial`: a logarithm for every token of the vocabulary,
one after the other, which is a third of a step of 32 sentences after top-k. So the scores are of a class that says,
by torch's protocol for subclasses, what these two functions are to do; all others get an ordinary tensor of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen import ops


@functools.cache
def draws_as_torch() -> bool:
    """Whether the operator is native and draws what `torch.multinomial` draws, which is up to each build of torch."""
    if not ops.has_runtime():
        return False
    ours, theirs = (torch.Generator().manual_seed(5) for _ in range(2))
    random = torch.Generator().manual_seed(1)
    probabilities = torch.rand(3, 700, generator=random, dtype=torch.float32, device="cpu")  # whatever the defaults
    probabilities[:, 50:600] = 0
    same = torch.equal(
        ops.multinomial(probabilities, generator=ours),
        torch.multinomial(probabilities, 1, generator=theirs).squeeze(1),
    )
    return same and torch.equal(ours.get_state(), theirs.get_state())


class _Replacing(Tensor):
    """`replaced`: what a function of torch's does instead with such a tensor."""

    replaced: dict[Callable[..., Any], Callable[..., Any]] = {}  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            named = {name: _plain(one) for name, one in (kwargs or {}).items()}
            return cls.replaced.get(func, func)(*map(_plain, args), **named)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _Replacing) else value


class _Probabilities(_Replacing):
    pass


class Scores(_Replacing):
    """Float32 `[rows, V]`, on the CPU."""


def _softmax(*args: Any, **kwargs: Any) -> Tensor:
    return torch.nn.functional.softmax(*args, **kwargs).as_subclass(_Probabilities)


def _multinomial(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs != {"num_samples": 1} or args[0].dtype != torch.float32 or args[0].dim() != 2:
        return torch.multinomial(*args, **kwargs)
    return ops.multinomial(args[0])[:, None]


Scores.replaced = {torch.nn.functional.softmax: _softmax}
_Probabilities.replaced = {torch.multinomial: _multinomial}
