"""The tree of many beams: it keeps the path of each beam as slots, one of each step, instead of a mask over all slots.

With M beams and T steps a mask has `M * M * T` entries and attention as many scores, of which all but `M * T` are
hidden. Paths have `M * T` entries, and `fastgen.ops.path_attention` computes no other scores. The keys and values are
where they are in any tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.cache.tree_layer import TreeLayer
from fastgen.layers.attention import is_plain
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE

WIDE_FROM = 32  # beams: benchmarks/bench_wide.py measures from how many on paths win
FIRST_STEPS = 16  # steps allocated at first: of many beams few ancestors stay, so pruning soon frees most slots
_FIRST_ROOM = 256  # steps on a path for which there is room at first
MOST_STATIC_STEPS = 1024  # a static tree has room for all steps, and each step reads all of it


class WideTree(BeamTree):
    """A beam tree whose `_ancestry` is a table of slots, int32 `[B, M, room]`, -1 where there is no step yet.

    There is room for all steps in a static tree, else for so many that the table has to grow now and then: the longest
    that is allowed may be any number.
    """

    def __init__(
        self, batch: int, beams: int, max_steps: int, buffers: Buffers | None = None, is_static: bool = False
    ) -> None:
        super().__init__(batch, beams, max_steps, buffers, is_static)
        self.capacity = max(1, min(max_steps, FIRST_STEPS)) * beams
        if is_static:  # paths have a place for each step, and the model's position bias one for each slot
            self.capacity = max(self.capacity, max_steps)
        self._first = batch, self.capacity

    def begin_decoding(self, prompt_mask: Tensor | None = None, device: torch.device | None = None) -> None:
        prompt = self.prompt_length
        device = device or next(tensor.device for layer in self.layers for tensor in layer.stored())
        room = self.max_steps if self.is_static else min(self.max_steps, _FIRST_ROOM)
        self._ancestry = torch.full((self.batch, self.beams, room), -1, dtype=torch.int32, device=device)
        # Which tokens of a path count, by their position: padding of the prompt does not.
        self._is_token = torch.ones(self.batch, prompt + room, dtype=torch.bool, device=device)
        if prompt_mask is not None:
            self._is_token[:, :prompt] = prompt_mask.bool()
        self._everything = torch.ones(1, dtype=torch.bool, device=device)
        self._places = torch.arange(self.beams, dtype=torch.int32, device=device)
        self._positions = torch.arange(prompt + self.capacity, device=device)[None]
        if self.is_static:
            self._positions = self._positions.repeat(self.batch, 1)
            self.slots = torch.zeros(self.beams, dtype=torch.int64, device=device)
            self._clock = torch.zeros((), dtype=torch.int64, device=device)

    def _parts(self) -> Iterator[tuple[Hashable, Tensor]]:
        yield "is_token", self._is_token
        yield from super()._parts()

    def restore_first_buffers(self) -> None:
        super().restore_first_buffers()
        self._is_token = self.retained.of(self.epoch)["is_token"]

    def reset_from(self, other: BeamTree) -> None:
        assert isinstance(other, WideTree)
        super().reset_from(other)
        self._is_token.copy_(other._is_token)

    def advance(self) -> None:
        if self._is_full():
            self._make_room()
        if self.steps == self._ancestry.shape[2]:
            self._lengthen()
        start = self.used
        self._ancestry[:, :, self.steps] = self._places + start
        self.steps += 1
        self.generated += self.beams
        self._positions[:, start : self.used].fill_(self.length)
        if self.is_static:
            torch.arange(start, self.used, out=self.slots, device=self.slots.device)
            self._clock.fill_(self.length)
        self._of_step.clear()

    def _lengthen(self) -> None:
        """Make room for twice as many steps on each path."""
        rows, token = self._ancestry, self._is_token
        self._ancestry = torch.cat([rows, torch.full_like(rows, -1)], dim=2)
        self._is_token = torch.cat([token, token.new_ones(len(token), rows.shape[2])], dim=1)

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "ancestry" else super()._padded(name, tensor)  # it is a table of steps

    def _ancestors(self) -> Tensor:
        is_ancestor = self._seen(self._ancestry[:, :, : self.steps].flatten(1))[:, self.prompt_length : self.used]
        most = int(is_ancestor.sum(1).max()) if is_ancestor.numel() else 0
        return is_ancestor.sort(dim=1, descending=True, stable=True)[1][:, :most]

    def _seen(self, slots: Tensor) -> Tensor:
        """Which slots are among `slots`, int32 `[..., n]`; bool `[..., width]`."""
        width = self.width
        seen = torch.zeros(*slots.shape[:-1], width + 1, dtype=torch.bool, device=slots.device)
        return seen.scatter_(-1, torch.where(slots < 0, width, slots).long(), True)[..., :width]

    def _prune(self, slots: Tensor) -> None:
        start, end = self.prompt_length, self.prompt_length + slots.shape[1]
        places = torch.zeros(self.batch, self.generated, dtype=torch.int32, device=slots.device)
        kept = torch.arange(start, end, dtype=torch.int32, device=slots.device).expand_as(slots)
        places.scatter_(1, slots, kept)
        paths = self._ancestry[:, :, : self.steps]
        old = (paths.flatten(1) - start).long()
        paths.copy_(places.gather(1, old).view_as(paths))
        if len(self._positions) < self.batch:
            self._positions = self._positions.repeat(self.batch, 1)
        self._positions[:, start:end] = self._positions[:, start:].gather(1, slots)
        self.generated, self._was_pruned = slots.shape[1], True
        for layer in self._all():
            layer.prune(slots)

    def reorder(self, parents: Tensor) -> None:
        paths = self._ancestry[:, :, : self.steps]
        paths.copy_(paths.flatten(0, 1).index_select(0, parents).view_as(paths))

    def select(self, sentences: Tensor) -> None:
        super().select(sentences)
        self._is_token = self._is_token.index_select(0, sentences)

    def ancestry(self) -> Tensor:
        """Which slots each beam sees, bool `[B, M, width]`: made anew, for what has no use for `slots_on_paths`."""
        seen = self._seen(self._ancestry)
        seen[:, :, : self.prompt_length] = self._is_token[:, None, : self.prompt_length]
        return seen

    def everything(self) -> Tensor:
        """A mask of the shape of `ancestry` that takes no memory: all is seen."""
        return self._everything.expand(self.batch, self.beams, self.width)

    def paths(self) -> Tensor:
        prompt = torch.arange(self.prompt_length, device=self._ancestry.device)
        generated = self._ancestry[:, :, : self.steps].flatten(0, 1).long()
        return torch.cat([prompt.expand(len(generated), -1), generated], dim=1)

    def slots_on_paths(self) -> Tensor:
        """The generated slots on each beam's path, int32 `[B*M, T]`, in a static tree with -1 behind the last."""
        return self._ancestry[:, :, : self._depth].flatten(0, 1)

    def path_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[B, 1, 1, P + T]` by the position on a path: 0 = attend, the dtype's minimum = don't."""

        def make() -> Tensor:
            seen = self._is_token[:, : self.prompt_length + self._depth]
            if window is not None:
                positions = torch.arange(seen.shape[1], device=seen.device)
                seen = seen & (self.position - positions < window)
            return additive_mask(seen, dtype)[:, None, None]

        return self.of_step(("path", window, dtype), make)

    @property
    def _depth(self) -> int:
        return self.max_steps if self.is_static else self.steps


def sees_paths(tree: BeamTree, layer: TreeLayer | None, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether this self-attention can be to paths: its keys and values are those of the layer, as they are stored."""
    if layer is None or layer.slim is not None or not isinstance(tree, WideTree):
        return False
    if query.dtype != torch.float32 or not is_plain(query):
        return False
    shown = zip((key, value), layer.stored(), strict=True)
    return all(x.data_ptr() == own.data_ptr() and x.stride() == own.stride() for x, own in shown)
