"""Keys and values with a row for each beam, copied when beams are chosen, and trees that go through the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.memory.buffers import Buffers

HEADS, SIZE = 2, 3


class DirtyBuffers(Buffers):
    """New memory holds what no result may depend on."""

    def __init__(self) -> None:
        super().__init__(None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 1, dtype=dtype, device=device)


class Prompt:
    """Keys and values of each layer, `[L, 2, B, H, P, D]`, and which positions may be seen, bool `[B, P]`."""

    def __init__(self, batch: int, length: int, windows: Sequence[int | None] = (None,), padded: bool = False) -> None:
        self.batch, self.length, self.windows = batch, length, windows  # a window for each layer
        self.stored = torch.randn(len(windows), 2, batch, HEADS, length, SIZE)
        padding = torch.randint(length, (batch, 1)) if padded and length else torch.zeros(batch, 1)
        self.mask = torch.arange(length) >= padding

    def tree(self, beams: int, max_steps: int, is_static: bool = False, kind: type[BeamTree] = BeamTree) -> BeamTree:
        """A tree that begins with it."""
        tree = kind(self.batch, beams, max_steps, DirtyBuffers(), is_static)
        tree.layers += [TreeLayer(tree, window) for window in self.windows]
        for layer, stored in zip(tree.layers, self.stored, strict=True):
            layer.prefill(*stored)
        tree.begin_decoding(self.mask)
        return tree


class NaiveCache:
    """What the hosts keep: all keys and values of each row, `[L, 2, B*M, H, T, D]`."""

    def __init__(self, prompt: Prompt, beams: int) -> None:
        self.beams, self.prompt_length = beams, prompt.length
        self.stored = prompt.stored.repeat_interleave(beams, 2)
        self.seen = prompt.mask.repeat_interleave(beams, 0)  # [B*M, T]

    @property
    def rows(self) -> int:
        return len(self.seen)

    @property
    def length(self) -> int:
        return self.seen.shape[1]

    def append(self, new: Tensor) -> None:
        """Keys and values of one position, `[L, 2, B*M, H, 1, D]`."""
        self.stored = torch.cat([self.stored, new], 4)
        self.seen = torch.cat([self.seen, self.seen.new_ones(self.rows, 1)], 1)

    def select(self, rows: Tensor) -> None:
        self.stored, self.seen = self.stored.index_select(2, rows), self.seen.index_select(0, rows)

    def attend(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        """Softmax attention of the last position, `[B*M, H, D]`."""
        keys, values = self.stored[layer]
        seen = self.seen if window is None else self.seen & (torch.arange(self.length) >= self.length - window)
        scores = torch.einsum("rhd,rhtd->rht", query[:, :, 0], keys).masked_fill(~seen[:, None], -torch.inf)
        return torch.einsum("rht,rhtd->rhd", scores.softmax(-1), values)

    def distinct(self) -> int:
        """How many generated tokens are on the paths of a sentence's beams, in the sentence that has the most."""
        keys = self.stored[0, 0, :, 0, self.prompt_length :, 0].unflatten(0, (-1, self.beams))  # random: all differ
        return max(len(each.unique()) for each in keys)


def attend(tree: BeamTree, layer: TreeLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention over the slots that a step spans, `[B*M, H, D]`."""
    queries = query[:, :, 0].unflatten(0, (tree.batch, tree.beams))
    scores = torch.einsum("bmhd,bhkd->bhmk", queries, keys) + tree.mask(layer.window, query.dtype)
    return torch.einsum("bhmk,bhkd->bmhd", scores.softmax(-1), values).flatten(0, 1)


def step(tree: BeamTree, caches: list[NaiveCache]) -> None:
    """One step of the tree, and of the caches whose rows it has, one below the other: attention is the same."""
    tree.advance()
    sizes = [cache.rows for cache in caches]
    new = torch.randn(len(tree.layers), 2, sum(sizes), HEADS, 1, SIZE)
    for cache, its in zip(caches, new.split(sizes, 2), strict=True):
        cache.append(its)
    for number, layer in enumerate(tree.layers):
        query = torch.randn(sum(sizes), HEADS, 1, SIZE)
        found = attend(tree, layer, query, *layer.append(*new[number]))
        parts = zip(caches, query.split(sizes), strict=True)
        expected = torch.cat([cache.attend(number, its, layer.window) for cache, its in parts])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def random_parents(batch: int, beams: int) -> Tensor:
    """Rows to continue, int64 `[B*M]`, each of the same sentence."""
    return (torch.randint(beams, (batch, beams)) + torch.arange(batch)[:, None] * beams).flatten()
