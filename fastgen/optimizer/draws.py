"""By how little torch's random draws are decided: what tells a near-tie of stock's from a difference."""

from __future__ import annotations

import contextlib
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastgen import locks

_watching = locks.lock()  # only one thread at a time replaces torch's function


@contextlib.contextmanager
def watched(seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside the block, tell `seen` by how little each of this thread's calls of `torch.multinomial` is decided: the
    relative gap to the next other draw, `[rows]`; inf if torch draws otherwise than `gap_of_draw` expects."""
    multinomial, thread = torch.multinomial, threading.get_ident()

    def drawn(weights: Tensor, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != thread:
            return multinomial(weights, num_samples, *args, **kwargs)
        gap, expected = gap_of_draw(weights, num_samples)
        result = multinomial(weights, num_samples, *args, **kwargs)
        seen(gap if torch.equal(result, expected) else torch.full_like(gap, torch.inf))
        return result

    with _watching, unittest.mock.patch.object(torch, "multinomial", drawn):
        yield


def gap_of_draw(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The relative gap to the next other draw, `[rows]`, and the draw: torch takes the largest ratios of weight to
    noise.

    Drawn candidates are then ranked by weight, so two of equal weight are a tie, too.
    """
    with torch.random.fork_rng([weights.device] if weights.is_cuda else []):
        ratios = weights / torch.empty_like(weights).exponential_()
    best = ratios.topk(min(count + 1, ratios.shape[-1]))
    gaps = [(best.values[:, :-1] - best.values[:, 1:]) / best.values[:, :-1]]
    if count > 1:
        ranked = weights.gather(1, best.indices[:, :count]).log().sort(descending=True).values
        gaps.append(ranked[:, :-1] - ranked[:, 1:])
    every = torch.cat(gaps, 1)
    smallest = every.masked_fill(every.isnan(), torch.inf).min(1).values
    return smallest, best.indices[:, :count] if count > 1 else ratios.argmax(-1, keepdim=True)
