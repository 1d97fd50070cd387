"""A tree of one path: the cache of one sentence without beams, of which a step may write several tokens at once."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.memory.buffers import Buffers

AT_ONCE = 256  # steps for which there is room at first
_WIDTH_STEP = 64  # buffers have room for multiples of so many positions, so that calls of like lengths share them


class PathTree(BeamTree):
    """The tree of one sentence with one beam, whose slots are its positions.

    A step's rows are tokens of the path that follow one another: each sees those before it, and itself. They may be
    drafts: a later step may begin at the same position, and writes over them. Always static: see `BeamTree`.
    """

    reads_several = True

    def __init__(self, prompt_length: int, max_steps: int, room: int, buffers: Buffers | None = None) -> None:
        """`room`: steps for which there is room at first."""
        super().__init__(1, 1, max_steps, buffers, is_static=True)
        self.prompt_length = prompt_length
        self.capacity = self._rounded(min(max_steps, room))
        self._by_rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # ancestry, slots, and the rows' numbers

    @property
    def epoch(self) -> Hashable:
        """A key that changes when buffers change shape or address: a prompt of another length alone changes neither."""
        return self.width

    def begin_decoding(self, prompt_mask: Tensor | None = None, device: torch.device | None = None) -> None:
        super().begin_decoding(prompt_mask, device)
        self._prompt = self._ancestry[0, 0, : self.prompt_length].clone()

    def reset_from(self, other: BeamTree) -> None:
        """Begin again, in place, with the prompt of `other`, a tree of the same width that has just begun."""
        assert isinstance(other, PathTree)
        self.prompt_length, self.capacity, self.max_steps = other.prompt_length, other.capacity, other.max_steps
        self._prompt, self.beams, self.steps, self.generated = other._prompt, 1, 0, 0
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.prompt_length = its.prompt_length
            for stored, theirs in zip(mine.stored(), its.stored(), strict=True):
                stored.copy_(theirs)  # with zeros behind the prompt: what an earlier call left there may be NaN
        self._of_step.clear()

    def open(self, count: int, rows: int) -> None:
        """Open a step of `rows` tokens, after `count` tokens beyond the prompt that stay: all that is stored of them is
        the model's own, and nothing is a draft's."""
        if count + rows > self.capacity:
            self._grow(count, count + rows)
        self.steps, self.generated, self.beams = count + 1, count + rows, rows
        if rows not in self._by_rows:
            self._by_rows[rows] = self._made(rows)
        self._ancestry, self.slots, numbers = self._by_rows[rows]
        start = self.prompt_length + count
        torch.add(numbers, start, out=self.slots)
        torch.le(self._positions, self.slots[:, None], out=self._ancestry[0])
        self._ancestry[:, :, : self.prompt_length] = self._prompt
        self._clock.fill_(start)
        self._of_step.clear()

    def clear_from(self, count: int) -> None:
        """Forget all that is stored behind `count` tokens beyond the prompt."""
        for layer in self._all():
            for stored in layer.stored():
                stored[:, :, self.prompt_length + count :] = 0

    def settle(self, count: int) -> None:
        """Leave `count` tokens beyond the prompt on the path, and none that was drafted."""
        if count:
            self.open(count - 1, 1)
        self.steps = self.generated = count

    def _grow(self, used: int, needed: int) -> None:
        self.generated = used  # what is in use is kept
        self.capacity = self._rounded(min(self.max_steps, max(2 * self.capacity, needed)))
        self._positions = torch.arange(self.width, device=self._positions.device)[None]
        self._by_rows.clear()
        for layer in self.layers:
            layer.grow()

    def _rounded(self, steps: int) -> int:
        """At least so many slots beyond the prompt, for a width that calls of like lengths share."""
        width = self.prompt_length + steps
        return -(-width // _WIDTH_STEP) * _WIDTH_STEP - self.prompt_length

    def _made(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._positions.device
        ancestry = torch.zeros(1, rows, self.width, dtype=torch.bool, device=device)
        return ancestry, torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        def make() -> Tensor:
            seen = self.ancestry()
            if window is not None:  # which keys it leaves out differs from row to row
                seen = seen & (self.slots[:, None] - self._positions < window)
            return additive_mask(seen, dtype)[:, None]

        return self.of_step((window, dtype), make)

    def reorder(self, parents: Tensor) -> None:
        """Nothing: there is one beam."""
