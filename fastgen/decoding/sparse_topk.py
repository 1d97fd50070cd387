"""`torch.topk` of rows that are -inf but for some places, with the same choice among equal values.

Which of several equal values `torch.topk` returns is not documented, and a search depends on it: beams that are dead
all have the same score. On a CPU, where k is small beside n, it is `std::partial_sort`: a heap of the first k values,
which takes in each later value that is greater than the heap's least. So a later -inf never enters, and the values
without them, in the same order behind the same first k, leave the same heap. Whether torch does so is tried once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen import phases

__phase__ = phases.CHOICE

_RATIO = 64  # torch takes this way if k times as much is at most n


def may_do(k: int, n: int, device: torch.device) -> bool:
    """Whether `sparse_topk` is exact for the `k` largest of `n` values."""
    return device.type == "cpu" and k * _RATIO <= n and _torch_keeps_a_heap()


def sparse_topk(values: Tensor, rows: Tensor, places: Tensor, batch: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of each row of a `[batch, n]` that holds -inf but for E values.

    Args:
        values: float `[E]`, no NaN.
        rows: int64 `[E]`, in ascending order.
        places: int64 `[E]`, of each value in its row, in ascending order within a row.
        batch: the number of rows.
        k: see `may_do`.

    Returns: as `torch.topk`, `[batch, k]` each, the largest values and their places; and which of the E values each
        is, -1 for a -inf that is none of them.
    """
    counts = torch.bincount(rows, minlength=batch)
    width = max(_RATIO * k, k + int(counts.max()))
    first = counts.cumsum(0) - counts
    number = torch.arange(len(rows), device=rows.device)
    behind = number - first.index_select(0, rows) + k
    column = torch.where(places < k, places, behind)
    compact = values.new_full((batch, width), -float("inf"))
    compact[rows, column] = values
    source = rows.new_full((batch, width), -1)
    source[rows, column] = number
    found, columns = torch.topk(compact, k)
    numbers = source.gather(1, columns)
    return found, torch.where(numbers < 0, columns, places[numbers.clamp(min=0)]), numbers


@functools.cache
def _torch_keeps_a_heap() -> bool:
    """Whether `sparse_topk` returns what this torch does, tried on values many of which are equal."""
    generator = torch.Generator("cpu").manual_seed(1)
    k, n, batch = 12, 12 * _RATIO + 5, 64
    for share in (0.003, 0.02, 0.2):
        dense = torch.randint(-4, 3, (batch, n), generator=generator, device="cpu").float()
        dense.masked_fill_(torch.rand(dense.shape, generator=generator, device="cpu") > share, -float("inf"))
        rows, places = torch.nonzero(dense > -float("inf"), as_tuple=True)
        values, chosen = torch.topk(dense, k)
        found, there, _ = sparse_topk(dense[rows, places], rows, places, batch, k)
        if not (torch.equal(values, found) and torch.equal(chosen, there)):
            return False
    return True
