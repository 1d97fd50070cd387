"""A tree whose sentences come and go, so that the batch stays full: waiting ones take the places of those that left.

Every sentence is at a position of its own. What attention needs is how far back a slot lies, so positions are kept
relative to one clock, by which all sentences are at the same position; absolute ones are the adapters' business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.row_pool import RowPool
from fastgen.cache.tree import FIRST_STEPS, BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE

_ROOM = 32  # steps allocated ahead
_FOREVER = 2**40


class JointLayer(TreeLayer):
    """A layer of a joint tree."""

    def __init__(self, tree: BatchTree, like: TreeLayer, rows: int) -> None:
        """`like`: a layer of the newcomers; `rows`: sentences to make room for at once."""
        super().__init__(tree, like.window, like.slim)
        self._seats = [RowPool(rows, tree.buffers) for _ in like.stored()]

    def clear(self) -> None:
        super().clear()
        for seats in self._seats:
            seats.clear()

    def regroup(self, stay: Tensor, slots: Tensor, newcomers: list[TreeLayer], used: int) -> None:
        """Keep the sentences `stay`, int64 `[S]`, of each these slots, int64 `[S, W]`, and put new prompts behind."""
        capacity = self.tree.capacity
        taken = self._stored or [None] * len(self._seats)
        prompts = [[stored[:, :, : layer.tree.prompt_length] for stored in layer.stored()] for layer in newcomers]
        self._stored = tuple(
            seats.regroup(taken[i], stay, slots, [prompt[i] for prompt in prompts], used, capacity)
            for i, seats in enumerate(self._seats)
        )


class BatchTree(BeamTree):
    """Sentences of several trees. A prompt's slots are like all others: they go when nobody sees them."""

    def __init__(self, rows: int, beams: int, device: torch.device, buffers: Buffers) -> None:
        """`rows`: sentences to make room for at once."""
        super().__init__(0, beams, _FOREVER, buffers)
        self._rows = rows
        self.capacity = FIRST_STEPS * beams
        self.begin_decoding(device=device)

    @property
    def length(self) -> int:
        """The clock: every sentence's tokens so far, had all begun with the oldest."""
        return max(self.steps - 1, 0)

    def regroup(self, stay: Tensor, newcomers: list[BeamTree]) -> None:
        """Drop all sentences but `stay` (int64 `[S]`) and put other trees', which hold their prompts, behind."""
        self._ancestry = self._ancestry.index_select(0, stay)
        self._positions = self._positions.expand(self.batch, -1).index_select(0, stay)
        self.batch = len(stay)
        slots = self._ancestors()  # [S, W]
        most = max([slots.shape[1], *(tree.prompt_length for tree in newcomers)])
        if self.capacity < most + self.beams or self.capacity > 2 * (most + _ROOM * self.beams):
            self.capacity = most + _ROOM * self.beams

        batch = self.batch + sum(tree.batch for tree in newcomers)
        ancestry = self._ancestry.new_zeros(batch, self.beams, self.capacity)
        ancestry[: self.batch, :, : slots.shape[1]] = self._ancestry.gather(
            2, slots[:, None].expand(-1, self.beams, -1)
        )
        positions = self._positions.new_zeros(batch, self.capacity)
        positions[: self.batch, : slots.shape[1]] = self._positions.gather(1, slots)
        first = self.batch
        for tree in newcomers:
            sentences, prompt = slice(first, first + tree.batch), tree.prompt_length
            ancestry[sentences, :, :prompt] = tree.ancestry()
            positions[sentences, :prompt] = torch.arange(self.steps - prompt, self.steps, device=positions.device)
            first += tree.batch
        for index in range(max([len(self.layers), *(len(tree.layers) for tree in newcomers)])):
            others = [tree.layers[index] for tree in newcomers]
            if index == len(self.layers):
                self.layers.append(JointLayer(self, others[0], self._rows))
            layer = self.layers[index]
            assert isinstance(layer, JointLayer)
            layer.regroup(stay, slots, others, most)
        rotations = [tree.rotations for tree in newcomers if tree.rotations is not None]
        if rotations and self.rotations is None:
            self.rotations = JointLayer(self, rotations[0], self._rows)
        if isinstance(self.rotations, JointLayer):
            self.rotations.regroup(stay, slots, rotations, most)

        # The clock starts anew with the oldest position that somebody sees: it stays below the slots in use.
        if most:
            lowest = int(positions.masked_fill(~ancestry.any(1), _FOREVER).min())
            positions = (positions - lowest).clamp(min=0)
            self.steps -= lowest
        self._ancestry, self._positions, self.batch, self.generated = ancestry, positions, batch, most
        self.forget_masks()
