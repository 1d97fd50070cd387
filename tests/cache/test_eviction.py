"""Evicting in place equals a copy of those that stay."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch
from naive_cache import HEADS, SIZE, Prompt

from fastgen.cache.eviction import in_place, moves_to, staying


def test_the_last_take_the_places() -> None:
    leaving = torch.tensor([False, True, False, True, False, False, True])
    stay = staying(leaving)
    assert stay.tolist() == [0, 4, 2, 5]
    assert moves_to(stay) == [(1, 4), (3, 5)]
    assert staying(torch.tensor([True, True])).tolist() == [] and moves_to(staying(torch.tensor([True]))) == []
    assert staying(torch.tensor([False, False, True])).tolist() == [0, 1]


def test_another_order_has_no_moves() -> None:
    """One would be overwritten before it is read."""
    assert moves_to(torch.tensor([1, 2])) is None
    assert moves_to(torch.tensor([0, 2])) == [(1, 2)]
    assert moves_to(torch.tensor([1, 0, 3])) is None


@pytest.mark.parametrize("seed", range(20))
def test_as_a_copy(seed: int) -> None:
    source = random.Random(seed)
    batch = source.randint(1, 9)
    leaving = torch.tensor([source.random() < 0.4 for _ in range(batch)])
    stay = staying(leaving)
    assert sorted(stay.tolist()) == torch.nonzero(~leaving)[:, 0].tolist()
    tensor = torch.randn(batch, 2, 7, 3)
    expected, moves = tensor.index_select(0, stay), moves_to(stay)
    assert moves is not None
    unused = tensor[:, :, 5:].clone()
    found = in_place(tensor, len(stay), moves, used=5)
    assert found[:, :, :5].equal(expected[:, :, :5])
    assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert found[:, :, 5:].equal(unused[: len(stay)])
    assert in_place(expected.clone(), len(stay), []).equal(expected)


@pytest.mark.parametrize("static", [False, True])
def test_a_tree_copies_only_who_takes_a_place(static: bool) -> None:
    """All sentences' keys stay where they are; those of a static tree, whose captured steps may be kept, are copied."""
    prompt = Prompt(4, 3)
    tree = prompt.tree(2, 8, is_static=static)
    layer = tree.layers[0]
    tree.advance()
    layer.append(*torch.randn(2, 8, HEADS, 1, SIZE))
    before = [stored.clone() for stored in layer.stored()]
    where = [stored.data_ptr() for stored in layer.stored()]
    stay = staying(torch.tensor([False, True, False, False]))
    tree.select(stay)
    assert stay.tolist() == [0, 3, 2]
    assert ([stored.data_ptr() for stored in layer.stored()] == where) == (not static)
    for stored, its in zip(layer.stored(), before, strict=True):
        assert stored[:, :, : tree.used].equal(its.index_select(0, stay)[:, :, : tree.used])
