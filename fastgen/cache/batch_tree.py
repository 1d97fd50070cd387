"""A beam tree of a batch that stays full: waiting sentences take the places of those that have finished and left.

The sentences have different numbers of tokens. Attention needs only how far back a slot lies, so positions are
kept relative to one clock, by which all sentences are at the same position. Adapters know the absolute positions.
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
    """What one layer of a `BatchTree` stores."""

    def __init__(self, tree: BatchTree, like: TreeLayer, rows: int) -> None:
        """`like`: the same layer of a newcomers' tree; `rows`: number of sentences to allocate memory for at first."""
        super().__init__(tree, like.window, like.slim)
        self._seats = [RowPool(rows, tree.buffers) for _ in like.stored()]

    def clear(self) -> None:
        super().clear()
        for seats in self._seats:
            seats.clear()

    def regroup(self, stay: Tensor, slots: Tensor, newcomers: list[TreeLayer], used: int) -> None:
        """Keep `slots`, int64 `[S, W]`, of the sentences `stay`, int64 `[S]`, and append the newcomers' prompts."""
        capacity = self.tree.capacity
        taken = self._stored or [None] * len(self._seats)
        prompts = [[stored[:, :, : layer.tree.prompt_length] for stored in layer.stored()] for layer in newcomers]
        self._stored = tuple(
            seats.regroup(taken[i], stay, slots, [prompt[i] for prompt in prompts], used, capacity)
            for i, seats in enumerate(self._seats)
        )


class BatchTree(BeamTree):
    """A beam tree that takes over sentences of other trees. It drops prompt slots, too, when no beam sees them."""

    def __init__(self, rows: int, beams: int, device: torch.device, buffers: Buffers) -> None:
        """`rows`: number of sentences to allocate memory for at first."""
        super().__init__(0, beams, _FOREVER, buffers)
        self._rows = rows
        self.capacity = FIRST_STEPS * beams
        self.begin_decoding(device=device)

    @property
    def length(self) -> int:
        """The clock: the number of tokens that each sentence would have if all had begun with the oldest."""
        return max(self.steps - 1, 0)

    def regroup(self, stay: Tensor, newcomers: list[BeamTree]) -> None:
        """Drop all sentences but `stay` (int64 `[S]`) and append those of `newcomers`, trees that hold only prompts."""
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

        # The oldest position that a beam sees becomes 0, so that the clock stays below the number of slots in use.
        if most:
            lowest = int(positions.masked_fill(~ancestry.any(1), _FOREVER).min())
            positions = (positions - lowest).clamp(min=0)
            self.steps -= lowest
        self._ancestry, self._positions, self.batch, self.generated = ancestry, positions, batch, most
        self.forget_masks()
