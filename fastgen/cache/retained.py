"""Buffers that a static tree has outgrown, kept so that later calls can replay the steps captured on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from fastgen import phases
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE

_OUTGROWN = 2  # all buffers kept may take so many times the memory in use


class RetainedBuffers:
    """A static tree's buffers by epoch and name; within an epoch no buffer changes shape or address."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._by_epoch: dict[Hashable, dict[Hashable, Tensor]] = {}
        self._is_captured: Callable[[Hashable], bool] | None = None  # whether a step was captured in an epoch
        self._fits: Callable[[int], bool] = lambda nbytes: False  # whether so many bytes may be kept

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._is_captured is not None

    def begin(
        self,
        epoch: Hashable,
        parts: Iterable[tuple[Hashable, Tensor]],
        is_captured: Callable[[Hashable], bool],
        fits: Callable[[int], bool],
    ) -> None:
        """Keep from now on what is outgrown; `parts` are the buffers of the epoch that has just begun, by name."""
        self._is_captured, self._fits = is_captured, fits
        self._by_epoch.setdefault(epoch, dict(parts))

    def empty(
        self, epoch: Hashable, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised buffer, perhaps one retained from an earlier call in the same epoch."""
        here = self._by_epoch.setdefault(epoch, {})
        if name not in here:
            here[name] = self._buffers.empty(shape, dtype, device)
        return here[name]

    def of(self, epoch: Hashable) -> dict[Hashable, Tensor]:
        """The buffers of this epoch, by name."""
        return self._by_epoch[epoch]

    def has(self, epoch: Hashable) -> bool:
        """Whether buffers are kept for this epoch: a tree that comes to it will use them again."""
        return epoch in self._by_epoch

    def leave(self, epoch: Hashable, is_first: bool) -> None:
        """End this epoch, and drop buffers that are not worth keeping; `is_first`: trees begin with this epoch."""
        if self.is_on and not self._fits(self.nbytes):
            self.drop()
        self.drop_unless_worth(epoch, is_first)

    def drop_unless_worth(self, epoch: Hashable, is_first: bool) -> None:
        """Drop this epoch's buffers, unless trees begin with them, or a step was captured there and they are small."""
        if self._is_captured is None or epoch not in self._by_epoch or is_first:
            return
        # Those that a later, larger epoch will use again are not outgrown.
        outgrown = itertools.takewhile(lambda other: other != epoch, self._by_epoch)
        in_use, kept = self._nbytes(epoch), sum(map(self._nbytes, outgrown))
        if not self._is_captured(epoch) or kept + in_use > _OUTGROWN * in_use:
            del self._by_epoch[epoch]

    def drop(self) -> None:
        """Keep nothing any longer."""
        self._is_captured = None
        self._by_epoch.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers kept, those in use included."""
        return sum(map(self._nbytes, self._by_epoch))

    def _nbytes(self, epoch: Hashable) -> int:
        return sum(tensor.nbytes for tensor in self._by_epoch[epoch].values())
