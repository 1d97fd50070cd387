"""Rows that leave and enter in place are those of a new tensor."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch
import torch.nn.functional as F
from naive_cache import HEADS, SIZE, DirtyBuffers
from torch import Tensor

from fastgen.cache.row_pool import RowPool


def drawn(rows: int, slots: int) -> Tensor:
    return torch.randn(rows, HEADS, slots, SIZE)


@pytest.mark.parametrize("by_slots", [False, True], ids=["first slots", "chosen slots"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go(seed: int, by_slots: bool) -> None:
    """Each row that stays keeps its first slots, as a source's keys, or some of its own, as a joint tree's."""
    torch.manual_seed(seed)
    pool, taken, slots = RowPool(3, DirtyBuffers()), drawn(0, 0), None
    for capacity in (12, 12, 12, 12, 15, 15, 15):
        newcomers = [drawn(number, int(torch.randint(13, ()))) for number in (1, 2)]
        used = max(each.shape[2] for each in newcomers)  # whatever stays is cut off there, or filled up
        stay = (torch.rand(len(taken)) < 0.6).nonzero()[:, 0]
        staying = taken[stay]
        if by_slots:
            slots = torch.rand(staying.shape[::2]).argsort(1)[:, : used // 2]
            staying = staying.gather(2, slots[:, None, :, None].expand(-1, HEADS, -1, SIZE))
        held = pool.regroup(taken if len(taken) else None, stay, slots, newcomers, used, capacity)
        taken = held[:, :, :used]
        assert held.shape[2] == capacity
        assert taken.equal(torch.cat([F.pad(each, (0, 0, 0, used - each.shape[2])) for each in (staying, *newcomers)]))


def test_in_place() -> None:
    pool, rows, none = RowPool(4, DirtyBuffers()), drawn(3, 5), torch.arange(0)
    first = pool.regroup(None, none, None, [rows], 5, 8)
    second = pool.regroup(first, torch.tensor([0, 2]), None, [drawn(2, 5)], 5, 8)
    assert second.data_ptr() == first.data_ptr() and second[:2, :, :5].equal(rows[[0, 2]])
    third = pool.regroup(second, torch.arange(4), None, [drawn(1, 5)], 5, 8)
    assert third.data_ptr() != first.data_ptr(), "there was no room for five"
    fourth = pool.regroup(third, torch.arange(5), None, [], 5, 9)
    assert fourth.data_ptr() != third.data_ptr(), "there was no room for nine slots"
    pool.clear()
    assert pool.regroup(None, none, None, [rows], 4, 9)[:, :, :4].equal(rows[:, :, :4])
