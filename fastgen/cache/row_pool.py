"""A tensor whose rows leave and enter in place."""

from __future__ import annotations

from torch import Tensor

from fastgen import phases
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE


class RowPool:
    """A tensor `[batch, H, slots, D]` within a larger one that is kept, so that rows leave and enter in place.

    Fresh memory of this size would cost more page faults than the copying itself.
    """

    def __init__(self, rows: int, buffers: Buffers) -> None:
        self._rows, self._buffers = rows, buffers
        self._buffer: Tensor | None = None

    def regroup(
        self,
        taken: Tensor | None,
        stay: Tensor,
        slots: Tensor | None,
        newcomers: list[Tensor],
        used: int,
        capacity: int,
    ) -> Tensor:
        """The new tensor, `[S + newcomers', H, capacity, D]`; slots up to `used` that were never written are zeros.

        Args:
            taken: the tensor so far, `[batch, H, slots, D]`.
            stay: its rows to keep, int64 `[S]`.
            slots: which of their slots to keep, int64 `[S, W]`; None keeps the first `used`.
            newcomers: rows to put behind, each `[rows, H, slots, D]`.
        """
        like = newcomers[0] if taken is None else taken
        batch = len(stay) + sum(len(rows) for rows in newcomers)
        self._rows = max(self._rows, batch)
        buffer = self._buffer
        if buffer is None or buffer.shape[0] < batch or buffer.shape[2] != capacity:
            shape = (self._rows, like.shape[1], capacity, like.shape[3])
            buffer = self._buffers.empty(shape, like.dtype, like.device)
        if taken is not None and len(stay):
            # Indexing copies, so that rows may be written where others were.
            if slots is None:
                width = min(used, taken.shape[2])
                buffer[: len(stay), :, :width] = taken[:, :, :width].index_select(0, stay)
            else:
                width = slots.shape[1]
                buffer[: len(stay), :, :width] = taken.transpose(1, 2)[stay[:, None], slots].transpose(1, 2)
            buffer[: len(stay), :, width:used] = 0
        first = len(stay)
        for rows in newcomers:
            width = min(used, rows.shape[2])
            buffer[first : first + len(rows), :, :width] = rows[:, :, :width]
            # No beam sees these slots, but a weight of zero times infinity is NaN.
            buffer[first : first + len(rows), :, width:used] = 0
            first += len(rows)
        self._buffer = buffer
        return buffer[:batch]

    def clear(self) -> None:
        """Let go of the buffer."""
        self._buffer = None
