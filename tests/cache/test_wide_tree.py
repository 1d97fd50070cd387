"""A tree of paths goes through what a tree of masks goes through, and its paths are those that the masks show."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch
from naive_cache import HEADS, SIZE, NaiveCache, Prompt, random_parents, step

from fastgen import ops
from fastgen.cache import wide_tree
from fastgen.cache.wide_tree import WideTree


def check(tree: WideTree, naive: NaiveCache) -> None:
    """The paths, and attention to them, are those of rows with caches of their own."""
    assert tree.length == int(tree.position) == naive.length - 1
    paths, sentences = tree.paths(), torch.arange(naive.rows)[:, None] // tree.beams
    for layer, own in zip(tree.layers, naive.stored, strict=True):
        for mine, its in zip(layer.stored(), own, strict=True):
            assert mine[sentences, :, paths].transpose(1, 2).equal(its)
    generated = tree.slots_on_paths()
    assert generated[:, : tree.steps].equal(paths[:, tree.prompt_length :].int())
    assert generated.shape[1] == (tree.max_steps if tree.is_static else tree.steps)
    assert (generated[:, tree.steps :] == -1).all()
    assert tree.everything().shape == tree.ancestry().shape and tree.everything().all()
    for number, layer in enumerate(tree.layers):
        query = torch.randn(naive.rows, HEADS, 1, SIZE)
        bias = tree.path_bias(layer.window, query.dtype)
        keys, values = layer.spanned()
        found = ops.path_attention(query, keys, values, generated, bias, 1.0, tree.prompt_length)[:, 0]
        torch.testing.assert_close(found, naive.attend(number, query, layer.window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed).choice
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", draw(range(1, 10)))
    monkeypatch.setattr(wide_tree, "_FIRST_ROOM", random.Random(seed).choice(range(1, 40)))
    prompt = Prompt(draw(range(1, 5)), draw([0, 1, 5]), draw([(None,), (1, None), (4, 7)]), draw([False, True]))
    tree = prompt.tree(draw(range(1, 5)), 30, draw([False, True]), WideTree)
    assert isinstance(tree, WideTree)
    naive = NaiveCache(prompt, tree.beams)
    leaves, chance = draw([0, 0.1]), draw([0, 0.5, 1])  # that a sentence leaves after a step, that beams are chosen
    for _ in range(30):
        step(tree, [naive])  # by the masks
        check(tree, naive)
        stay = (torch.rand(tree.batch) >= leaves).nonzero()[:, 0]
        if 0 < len(stay) < tree.batch:
            tree.select(stay)
            naive.select((stay[:, None] * tree.beams + torch.arange(tree.beams)).flatten())
        if float(torch.rand(())) < chance:
            parents = random_parents(tree.batch, tree.beams)
            tree.reorder(parents)
            naive.select(parents)


def addresses(tree: WideTree) -> list[int]:
    """Where all is that a step of a static tree reads or writes."""
    tensors = [tree.slots_on_paths(), tree.everything(), tree.positions(), tree.slots, tree.position]
    return [each.data_ptr() for each in (*tensors, *(each for layer in tree.layers for each in layer.spanned()))]


def test_a_tree_that_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call after call on the same tree is as on a new one, in the same buffers, whatever has left in between."""
    torch.manual_seed(0)
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 8)
    tree: Any = Prompt(3, 4, (None, 3)).tree(2, 40, True, WideTree)
    tree.retain_buffers(lambda epoch: True, lambda nbytes: True)
    seen: dict[Any, list[int]] = {}
    for call in range(4):
        prompt = Prompt(3, 4, (None, 3), padded=True)
        tree.reset_from(prompt.tree(2, 40, True, WideTree))
        naive = NaiveCache(prompt, 2)
        for number in range(40):
            step(tree, [naive])
            check(tree, naive)
            if not tree.evictions:
                assert seen.setdefault(tree.epoch, addresses(tree)) == addresses(tree)
            if number > 20:
                parents = random_parents(tree.batch, 2)
                tree.reorder(parents)
                naive.select(parents)
            if call % 2 and number == 35:
                tree.select(torch.tensor([0, 2]))
                naive.select(torch.tensor([0, 1, 4, 5]))
        tree.restore_first_buffers()
        assert (tree.batch, tree.epoch) == (3, (0, 40))  # at first a static tree has a slot for each step, or more
    assert len(seen) > 1


def test_attention_to_paths_does_not_see_other_beams() -> None:
    """The check above can fail: with two beams' paths exchanged it does."""
    torch.manual_seed(0)
    prompt = Prompt(1, 2)
    tree: Any = prompt.tree(3, 6, kind=WideTree)
    naive = NaiveCache(prompt, 3)
    for _ in range(3):
        step(tree, [naive])
    check(tree, naive)
    tree.reorder(torch.tensor([1, 0, 2]))
    with pytest.raises(AssertionError):
        check(tree, naive)
