"""What one layer of a tree stores: keys and values, or what a slim cache has in their place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.eviction import Moves, in_place
from fastgen.cache.slim.latent import Slim, keys_and_values

__phase__ = phases.CACHE


class Slots(Protocol):
    """The attributes of a `BeamTree` that a layer uses."""

    prompt_length: int
    capacity: int
    beams: int
    is_static: bool
    slots: Tensor
    rotations: Any  # a TreeLayer, or None

    @property
    def used(self) -> int: ...

    @property
    def width(self) -> int: ...

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...


class TreeLayer:
    """The cache of one layer: tensors `[B, H, capacity, D]`, of which the first `tree.used` slots are in use. They hold
    keys and values or, if the layer has a `slim` cache, what keys and values are computed from."""

    def __init__(self, tree: Slots, window: int | None = None, slim: Slim | None = None) -> None:
        self.tree = tree
        self.window = window  # sliding-window size in tokens, None: unlimited
        self.slim = slim
        self._stored: tuple[Tensor, ...] = ()
        self.prompt_length = 0  # number of prompt slots stored so far

    def prefill(self, *tensors: Tensor) -> None:
        """Store the prompt's keys and values, each `[B, H, P, D]`, or those of the prompt's next part."""
        start = self.prompt_length
        end = start + tensors[0].shape[2]
        self.tree.prompt_length = self.prompt_length = end
        capacity = end + self.tree.capacity
        if not self._stored:
            self._stored = self._grown(tensors, capacity)
            return
        self._stored = self._grown(tuple(stored[:, :, :start] for stored in self._stored), capacity)
        for stored, tensor in zip(self._stored, tensors, strict=True):
            stored[:, :, start:end] = tensor

    def append(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Write this step's keys and values and return those of all slots that a step spans, each `[B, H, width, D]`.

        `tensors`: one row per beam, `[B*M, H, 1, D]`, or beams as positions, `[B, H, M, D]`.
        """
        tree = self.tree
        start, used = tree.used - tree.beams, tree.used
        added = tuple(_beams_as_positions(tensor, tree.beams) for tensor in tensors)
        if any(stored.dtype != new.dtype for stored, new in zip(self._stored, added, strict=True)):
            added = self._promoted(added)
        for stored, new in zip(self._stored, added, strict=True):
            if tree.is_static:
                stored.index_copy_(2, tree.slots, new)
            else:
                stored[:, :, start:used] = new
        return self.spanned()

    def grow(self) -> None:
        """Make room for as many slots as the tree has allocated."""
        if not self._stored:
            return
        used = tuple(stored[:, :, : self.tree.used] for stored in self._stored)
        self._stored = self._grown(used, self.tree.prompt_length + self.tree.capacity)

    def stored(self) -> tuple[Tensor, ...]:
        """The buffers, from the prompt on; an empty tuple if the model has skipped this layer."""
        return self._stored

    def spanned(self) -> tuple[Tensor, ...]:
        """The tensors that attention reads, for the slots that a step spans."""
        return tuple(stored[:, :, : self.tree.width] for stored in self.needed())

    def needed(self) -> tuple[Tensor, ...]:
        """The buffers, with the tree's cosines and sines if this layer's slim cache rotates keys."""
        rotations = self.tree.rotations
        if self.slim is None or not self.slim.rotates:
            return self.stored()
        assert rotations is not None
        return self.stored() + rotations.stored()

    def prompt(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt's slots so far, each `[B, H, P, D]`."""
        stored = tuple(stored[:, :, : self.prompt_length] for stored in self.needed())
        return keys_and_values(stored, self.slim)

    def select(self, sentences: Tensor, moves: Moves | None = None) -> None:
        """Keep only these sentences (int64 `[B']`), and of them only the slots in use; `moves`: in place, by these."""
        used = self.tree.used
        before = self._stored
        if not before:
            return
        if moves is not None:
            self._stored = tuple(in_place(stored, len(sentences), moves, used) for stored in before)
            return
        self._stored = self._empty(before, len(sentences), before[0].shape[2])
        for selected, stored in zip(self._stored, before, strict=True):
            torch.index_select(stored[:, :, :used], 0, sentences, out=selected[:, :, :used])
        self._clear_from(used, *self._stored)

    def prune(self, slots: Tensor) -> None:
        """Keep only the generated slots `slots`, int64 `[B, W]`, in this order."""
        start, end = self.tree.prompt_length, self.tree.prompt_length + slots.shape[1]
        sentences = torch.arange(len(slots), device=slots.device)[:, None]
        for stored in self._stored:
            stored[:, :, start:end] = stored[sentences, :, start + slots].transpose(1, 2)  # a copy, so in place

    def reset_from(self, other: TreeLayer | None) -> None:
        """Copy, in place, what `other`, a layer of the same shape, stores; None clears all slots."""
        if other is None:
            self._clear_from(0, *self.stored())
            return
        for mine, theirs in zip(self.stored(), other.stored(), strict=True):
            mine.copy_(theirs)

    def restore_first_buffers(self, retained: Mapping[Hashable, Tensor]) -> None:
        """Return to the buffers in `retained`, by layer and number."""
        self._stored = tuple(retained[self, number] for number in range(len(self._stored)))

    def clear(self) -> None:
        """Let go of the buffers."""
        self._stored = ()

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._stored)

    def _grown(self, tensors: tuple[Tensor, ...], capacity: int) -> tuple[Tensor, ...]:
        """Copies with room for `capacity` slots along dimension 2."""
        length = tensors[0].shape[2]
        grown = self._empty(tensors, len(tensors[0]), capacity)
        for larger, tensor in zip(grown, tensors, strict=True):
            larger[:, :, :length] = tensor
        self._clear_from(length, *grown)
        return grown

    def _promoted(self, added: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Code between two steps has turned autocast on or off: go on in the wider dtype of both, as `torch.cat` does,
        by which the hosts add to a cache. Such steps are never captured."""
        dtypes = [torch.promote_types(old.dtype, new.dtype) for old, new in zip(self._stored, added, strict=True)]
        self._stored = tuple(stored.to(dtype) for stored, dtype in zip(self._stored, dtypes, strict=True))
        return tuple(new.to(dtype) for new, dtype in zip(added, dtypes, strict=True))

    def _clear_from(self, slot: int, *tensors: Tensor) -> None:
        if self.tree.is_static:  # no beam sees those slots yet, but zero times uninitialised memory may be NaN
            for tensor in tensors:
                tensor[:, :, slot:] = 0

    def _empty(self, like: tuple[Tensor, ...], batch: int, capacity: int) -> tuple[Tensor, ...]:
        return tuple(
            self.tree.room((self, number), (batch, x.shape[1], capacity, x.shape[3]), x.dtype, x.device)
            for number, x in enumerate(like)
        )


def _beams_as_positions(rows: Tensor, beams: int) -> Tensor:
    """`[B*M, H, 1, D]` -> `[B, H, M, D]`; the latter is returned as it is."""
    if rows.shape[2] == beams:
        return rows
    return rows.view(-1, beams, rows.shape[1], rows.shape[3]).transpose(1, 2)
