"""Attention over the tree equals attention over keys and values that are copied for each beam."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch
from naive_cache import DirtyBuffers, NaiveCache, Prompt, random_parents, step

from fastgen.cache import tree as tree_module
from fastgen.cache.eviction import staying
from fastgen.cache.retained import RetainedBuffers
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer


class Run:
    """A tree and a naive cache: whatever is done is done to both, and all that the tree says is checked."""

    def __init__(self, prompt: Prompt, tree: BeamTree) -> None:
        self.tree, self.naive = tree, NaiveCache(prompt, tree.beams)
        self.generated = self.prunings = self.growths = 0

    def step(self) -> None:
        tree, capacity = self.tree, self.tree.capacity
        if self.generated + tree.beams > capacity and self.naive.distinct() <= 0.9 * self.generated:
            self.generated, self.prunings = self.naive.distinct(), self.prunings + 1
        self.generated += tree.beams
        step(tree, [self.naive])
        self.growths += tree.capacity > capacity
        self.check()

    def check(self) -> None:
        tree, naive = self.tree, self.naive
        assert tree.used == tree.prompt_length + self.generated
        assert tree.width == tree.prompt_length + (tree.capacity if tree.is_static else self.generated)
        assert tree.length == int(tree.position) == naive.length - 1
        assert tree.capacity <= tree.max_steps * tree.beams
        assert tree.nbytes == naive.stored[:, :, :: tree.beams, :, 0].nbytes * (tree.prompt_length + tree.capacity)
        paths = tree.paths()
        positions = tree.positions().expand(tree.batch, -1).repeat_interleave(tree.beams, 0).gather(1, paths)
        assert positions.equal(torch.arange(naive.length).expand(naive.rows, -1))
        sentences = torch.arange(naive.rows)[:, None] // tree.beams
        for layer, own in zip(tree.layers, naive.stored, strict=True):
            for mine, its in zip(layer.stored(), own, strict=True):
                assert mine[sentences, :, paths].transpose(1, 2).equal(its)

    def reorder(self, parents: torch.Tensor) -> None:
        self.tree.reorder(parents)
        self.naive.select(parents)
        self.check()

    def choose(self) -> None:
        self.reorder(random_parents(self.tree.batch, self.tree.beams))

    def select(self, sentences: torch.Tensor) -> None:
        self.tree.select(sentences)
        self.naive.select((sentences[:, None] * self.tree.beams + torch.arange(self.tree.beams)).flatten())


@pytest.mark.parametrize("seed", range(80))
def test_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed).choice
    monkeypatch.setattr(tree_module, "FIRST_STEPS", draw(range(1, 10)))
    prompt = Prompt(draw(range(1, 5)), draw([0, 1, 5]), draw([(None,), (1, None), (4, 7)]), draw([False, True]))
    run = Run(prompt, prompt.tree(draw(range(1, 5)), 30, draw([False, True])))
    leaves, chance = draw([0, 0.1]), draw([0, 0.5, 1])  # that a sentence leaves after a step, that beams are chosen
    in_order = draw([False, True])
    for _ in range(30):
        run.step()
        leaving = torch.rand(run.tree.batch) < leaves
        stay = (~leaving).nonzero()[:, 0] if in_order else staying(leaving)
        if 0 < len(stay) < run.tree.batch:
            run.select(stay)
        if float(torch.rand(())) < chance:
            run.choose()


def addresses(tree: BeamTree) -> list[int]:
    """Where all is that a step of a static tree reads or writes."""
    tensors = [tree.ancestry(), tree.positions(), tree.slots, tree.position]
    return [each.data_ptr() for each in (*tensors, *(each for layer in tree.layers for each in layer.spanned()))]


@pytest.mark.parametrize("static", [False, True], ids=["plain", "static"])
def test_more_steps_than_are_allocated_at_first(static: bool) -> None:
    """Of 200 steps with 3 beams little more than 200 slots stay; in a static tree nothing moves within an epoch."""
    torch.manual_seed(0)
    prompt = Prompt(2, 3, (None, 5), padded=True)
    run = Run(prompt, prompt.tree(3, 200, static))
    seen: dict[Any, Any] = {}
    for number in range(200):
        run.step()
        if static:
            assert run.tree.slots.tolist() == list(range(run.tree.used - 3, run.tree.used))
            assert seen.setdefault(run.tree.epoch, addresses(run.tree)) == addresses(run.tree)
        run.choose()
        if number == 190:
            run.select(torch.tensor([1]))
    assert run.prunings >= 2 and run.tree.epoch == (1, 240)
    assert [*seen] == ([(0, 192), (0, 240), (1, 240)] if static else [])


# ---------------------------------------------------------------------------------------------- by hand
def test_ancestry_of_two_beams_and_three_steps() -> None:
    """Slot 0 is the prompt's; each step opens two: beams 0 and 1 write to 1 and 2, then 3 and 4, then 5 and 6."""
    tree = Prompt(1, 1).tree(2, 3)
    tree.advance()
    assert tree.ancestry().int().tolist() == [[[1, 1, 0], [1, 0, 1]]]
    tree.reorder(torch.tensor([1, 1]))
    tree.advance()
    assert tree.ancestry().int().tolist() == [[[1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]]
    tree.reorder(torch.tensor([1, 0]))
    tree.advance()
    assert tree.ancestry().int().tolist() == [[[1, 0, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 1]]]
    assert tree.paths().tolist() == [[0, 2, 4, 5], [0, 2, 3, 6]]
    assert tree.positions().tolist() == [[0, 1, 1, 2, 2, 3, 3]]
    assert (tree.length, tree.used, tree.width) == (3, 7, 7)


def test_masks() -> None:
    """Padding on the left, and a window of two: a beam sees what it writes, and one token before."""
    prompt = Prompt(1, 2)
    prompt.mask = torch.tensor([[0, 1]])
    tree, no = prompt.tree(2, 2), torch.finfo(torch.float32).min
    tree.advance()
    assert tree.mask(None, torch.float32).tolist() == [[[[no, 0, 0, no], [no, 0, no, 0]]]]
    assert tree.mask(2, torch.float32).equal(tree.mask(None, torch.float32))
    tree.reorder(torch.tensor([0, 0]))
    tree.advance()
    assert tree.mask(2, torch.float32).tolist() == [[[[no, no, 0, no, 0, no], [no, no, 0, no, no, 0]]]]
    assert tree.mask(2, torch.float32) is tree.mask(2, torch.float32), "made once in a step"


def test_what_pruning_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first sentence three slots, and of the second four: the first gets one that nobody sees."""
    monkeypatch.setattr(tree_module, "FIRST_STEPS", 3)
    prompt = Prompt(2, 1)
    run = Run(prompt, prompt.tree(2, 9))
    for parents in ([0, 0, 2, 2], [1, 1, 2, 3], [0, 0, 2, 3]):
        run.step()
        run.reorder(torch.tensor(parents))
    assert run.tree.paths().tolist() == [[0, 1, 4, 5], [0, 1, 4, 5], [0, 1, 3, 5], [0, 1, 4, 6]]
    before = run.tree.layers[0].stored()[0].clone()
    run.step()
    tree, after = run.tree, run.tree.layers[0].stored()[0]
    assert (tree.used, tree.length) == (1 + 5 + 2, 4)
    assert tree.positions()[0, [0, 1, 2, 3, 6, 7]].tolist() == [0, 1, 2, 3, 4, 4]
    assert tree.positions()[1].tolist() == [0, 1, 2, 2, 3, 3, 4, 4]
    assert after[0, :, :4].equal(before[0][:, [0, 1, 4, 5]])
    assert after[1, :, :6].equal(before[1][:, [0, 1, 3, 4, 5, 6]])
    assert tree.ancestry().int().tolist() == [
        [[1, 1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]],
        [[1, 1, 1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1, 0, 1]],
    ]


def test_when_sentences_leave() -> None:
    """A sixteenth of those still here; half of them where the step is captured."""
    least = {(32, False): 2, (31, False): 1, (8, False): 1, (8, True): 4, (9, True): 4, (3, True): 1, (1, True): 1}
    for (batch, static), number in least.items():
        tree = BeamTree(batch, 2, 4, is_static=static)
        assert [tree.should_evict(each) for each in range(number + 1)] == [False] * number + [True]


def test_a_prompt_in_parts() -> None:
    prompt = Prompt(2, 7)
    tree = BeamTree(2, 2, 3, DirtyBuffers())
    tree.layers.append(TreeLayer(tree))
    for part in (slice(0, 1), slice(1, 5), slice(5, 7)):
        tree.layers[0].prefill(*prompt.stored[0, :, :, :, part])
        assert torch.stack(tree.layers[0].prompt()).equal(prompt.stored[0, :, :, :, : part.stop])
    tree.begin_decoding()
    Run(prompt, tree).step()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_autocast_that_changes_between_steps(first: torch.dtype, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts concatenate what they store, which goes on in the wider dtype and rounds nothing."""
    monkeypatch.setattr(tree_module, "FIRST_STEPS", 2)  # so that the tree grows, too
    other = torch.float32 if first == torch.bfloat16 else torch.bfloat16
    tree = BeamTree(2, 3, 9, DirtyBuffers(), static)
    tree.layers.append(TreeLayer(tree))
    expected = torch.randn(2, 2, 4, 5, 6).to(first)  # keys and values
    tree.layers[0].prefill(*expected)
    tree.begin_decoding()
    for dtype in (first, other, other, first, other, first):
        tree.advance()
        new = torch.randn(2, 2, 4, 3, 6).to(dtype)
        expected = torch.cat([expected, new], 3)
        found = torch.stack(tree.layers[0].append(*new))[:, :, :, : tree.used]
        assert found.dtype == expected.dtype and found.equal(expected)


# ---------------------------------------------------------------------------------------------- the next call
@pytest.mark.parametrize("kept", [[(0, 16), (0, 64)], [(0, 16)]], ids=str)
@pytest.mark.parametrize("length", [0, 4])
def test_a_tree_that_begins_again(length: int, kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call after call on the same tree is as on a new one, and in the same buffers where a step was captured there."""
    torch.manual_seed(length)
    monkeypatch.setattr(tree_module, "FIRST_STEPS", 8)
    tree = Prompt(3, length, (None, 3)).tree(2, 40, is_static=True)
    tree.retain_buffers(lambda epoch: epoch in kept, lambda nbytes: True)
    seen: dict[Any, list[int]] = {}
    for call in range(4):
        prompt = Prompt(3, length, (None, 3), padded=True)
        new = prompt.tree(2, 40, is_static=True)
        if not length:
            new.layers.clear()  # a host makes them at the first step
        tree.reset_from(new)
        run = Run(prompt, tree)
        for number in range(40):
            run.step()
            assert seen.setdefault(tree.epoch, addresses(tree)) == addresses(tree)
            if number > 20:
                run.choose()
            if call % 2 and number == 35:
                run.select(torch.tensor([0, 2]))
                assert not tree.retained.has(tree.epoch), "other calls have other sentences"
        assert (run.prunings, run.growths) == (1, 2)
        tree.restore_first_buffers()
        assert (tree.batch, tree.epoch) == (3, (0, 16))
        assert [epoch for epoch in seen if tree.retained.has(epoch)] == kept
        assert tree.retained_bytes >= tree.nbytes > 0
        seen = {epoch: seen[epoch] for epoch in kept}
    tree.close()
    assert tree.nbytes == tree.retained_bytes == 0


def test_what_does_not_fit_is_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "FIRST_STEPS", 4)
    tree, asked = Prompt(1, 1).tree(2, 40, is_static=True), []
    tree.retain_buffers(lambda epoch: True, lambda nbytes: bool(asked.append(nbytes)))
    kept = tree.retained_bytes
    for _ in range(5):
        tree.advance()
    assert asked == [kept] and not tree.retained.is_on and tree.retained_bytes == tree.nbytes


def test_which_buffers_are_worth_keeping() -> None:
    """Those in which a step was captured, and 240 bytes beside 240 others, but not 200: at most half is outgrown."""
    for epoch, numbers, is_worth in (("captured", 60, True), ("captured", 50, False), ("other", 1000, False)):
        retained = RetainedBuffers(DirtyBuffers())
        retained.begin("first", [("a", torch.zeros(60))], {"captured"}.__contains__, lambda nbytes: True)
        buffer = retained.empty(epoch, "a", (numbers,), torch.float32, torch.device("cpu"))
        assert retained.empty(epoch, "a", (numbers,), torch.float32, buffer.device) is buffer
        assert retained.nbytes == 240 + buffer.nbytes
        retained.leave("first", True)
        retained.leave(epoch, False)
        assert retained.has("first") and retained.has(epoch) == is_worth


def test_all_sizes_of_a_tree_that_grows_twice_are_kept() -> None:
    """A larger size that later calls will use again is not outgrown, and drops no smaller one."""

    def begun() -> BeamTree:
        tree = BeamTree(1, 1, 256, is_static=True)
        tree.layers.append(TreeLayer(tree))
        tree.layers[0].prefill(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
        tree.begin_decoding()
        return tree

    tree = begun()
    for _ in range(4):
        tree.retain_buffers(lambda epoch: True, lambda nbytes: True)
        for _ in range(256):
            tree.advance()
        tree.restore_first_buffers()
        assert [tree.retained.has((0, capacity)) for capacity in (64, 128, 256)] == [True] * 3
        tree.reset_from(begun())
