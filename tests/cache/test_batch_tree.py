"""Attention over a tree whose sentences come and go equals attention of each call by itself."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch
from naive_cache import HEADS, SIZE, DirtyBuffers, NaiveCache, Prompt, random_parents, step

from fastgen.cache import batch_tree
from fastgen.cache.batch_tree import BatchTree
from fastgen.cache.tree_layer import TreeLayer


class Run:
    """A joint tree, and for each call the naive cache of the sentences that are still here."""

    def __init__(self, beams: int) -> None:
        self.tree = BatchTree(2, beams, torch.device("cpu"), DirtyBuffers())
        self.calls: list[NaiveCache] = []

    def regroup(self, stays: list[bool] | torch.Tensor, newcomers: list[Prompt]) -> None:
        """`stays`: of each sentence whether it does."""
        beams, stays = self.tree.beams, torch.as_tensor(stays, dtype=torch.bool)
        for call, its in zip(self.calls, stays.split([call.rows // beams for call in self.calls]), strict=True):
            call.select(its.repeat_interleave(beams).nonzero()[:, 0])
        self.calls = [call for call in self.calls if call.rows] + [NaiveCache(prompt, beams) for prompt in newcomers]
        self.tree.regroup(stays.nonzero()[:, 0], [prompt.tree(beams, 1) for prompt in newcomers])
        assert self.tree.batch * beams == sum(call.rows for call in self.calls)

    def steps(self, count: int, chance: float = 1.0) -> None:
        for _ in range(count):
            step(self.tree, self.calls)
            self.check()
            if float(torch.rand(())) < chance:
                self.reorder(random_parents(self.tree.batch, self.tree.beams))

    def reorder(self, parents: torch.Tensor) -> None:
        self.tree.reorder(parents)
        first = 0
        for call in self.calls:
            call.select(parents[first : first + call.rows] - first)
            first += call.rows

    def check(self) -> None:
        """What each beam sees, in the order of positions, is what its row of the naive cache has."""
        tree = self.tree
        assert tree.nbytes == len(tree.layers) * 2 * tree.batch * HEADS * tree.capacity * SIZE * 4
        assert tree.used <= tree.capacity
        rows = [(call, row) for call in self.calls for row in range(call.rows)]
        for number, (call, row) in enumerate(rows):
            sentence, beam = divmod(number, tree.beams)
            slots, positions = tree.ancestry()[sentence, beam].nonzero()[:, 0], tree.positions()[sentence]
            slots, seen = slots[positions[slots].argsort()], call.seen[row]
            assert (tree.length - positions[slots]).equal(call.length - 1 - seen.nonzero()[:, 0])
            assert tree.layers[0].stored()[0][sentence, :, slots].equal(call.stored[0, 0, row][:, seen])


@pytest.mark.parametrize("seed", range(40))
def test_random_regrouping(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed).choice
    monkeypatch.setattr(batch_tree, "FIRST_STEPS", draw(range(1, 13)))
    monkeypatch.setattr(batch_tree, "_ROOM", draw(range(1, 7)))
    run, windows, chance = Run(draw([1, 2, 3])), draw([(None,), (4, None)]), draw([0, 0.5, 1])
    for _ in range(6):
        newcomers = [Prompt(draw([1, 2]), draw(range(7)), windows, padded=True) for _ in range(draw([0, 1, 2]))]
        stays = torch.rand(run.tree.batch) < 0.6
        if newcomers or stays.any():
            run.regroup(stays, newcomers)
            run.steps(draw(range(1, 12)), chance)


def test_a_newcomer_by_hand() -> None:
    """One sentence is two tokens ahead of the other, whose prompt lies in slots that have been dropped."""
    run = Run(2)
    tree = run.tree
    run.regroup([], [Prompt(1, 1)])
    assert (tree.batch, tree.used, tree.length, tree.prompt_length) == (1, 1, 0, 0)
    run.steps(3, chance=0)
    run.reorder(torch.tensor([1, 1]))
    assert tree.ancestry().int().tolist() == [[[1, 0, 1, 0, 1, 0, 1]] * 2]
    run.regroup([True], [Prompt(1, 2)])
    assert (tree.batch, tree.used) == (2, 4)
    assert tree.ancestry().int().tolist() == [[[1, 1, 1, 1]] * 2, [[1, 1, 0, 0]] * 2]
    assert tree.positions()[0].tolist() == [0, 1, 2, 3] and tree.positions()[1, :2].tolist() == [2, 3]
    run.steps(1, chance=0)
    assert tree.positions()[:, 4:].tolist() == [[4, 4]] * 2 and tree.length == 4
    run.regroup([False, True], [])
    assert (tree.batch, tree.used, tree.length) == (1, 4, 2), "the clock begins with the oldest that is here"
    run.steps(2)


def test_the_clock_and_the_memory_stay_small() -> None:
    torch.manual_seed(0)
    run = Run(2)
    run.regroup([], [Prompt(1, 300)])
    run.steps(1)
    for _ in range(12):
        run.regroup(torch.rand(run.tree.batch) < 0.5, [Prompt(1, 3)])
        run.steps(15)
        assert run.tree.length < run.tree.used
    run.regroup([False] * run.tree.batch, [Prompt(1, 1)])
    assert run.tree.length == 0 and run.tree.capacity <= 2 * (1 + 32 * 2)


def test_rotations_move_with_the_slots() -> None:
    """What a tree stores for all layers, here the positions themselves, stays with its slots."""
    tree, lengths = BatchTree(2, 2, torch.device("cpu"), DirtyBuffers()), torch.tensor([], dtype=torch.int64)
    for stay, number in (([], 1), ([0], 1), ([0, 1], 0), ([1], 2)):
        newcomers = [Prompt(number, 5).tree(2, 1)] if number else []
        for new in newcomers:
            new.rotations = TreeLayer(new)
            new.rotations.prefill(torch.arange(5.0).view(1, 1, 5, 1).repeat(number, 1, 1, 1))
        tree.regroup(torch.tensor(stay, dtype=torch.int64), newcomers)
        assert tree.rotations is not None
        lengths = torch.cat([lengths[stay], torch.full((number,), 5)])
        for _ in range(4):
            tree.advance()
            (held,) = tree.rotations.append(lengths.repeat_interleave(2).view(-1, 1, 1, 1).float())
            lengths = lengths + 1
            for sentence, length in enumerate(lengths.tolist()):
                for seen in tree.ancestry()[sentence]:
                    assert held[sentence, 0, seen, 0].sort().values.tolist() == list(range(length))
            tree.reorder(random_parents(tree.batch, 2))
    tree.close()
    assert tree.nbytes == 0 and tree.rotations.stored() == ()
