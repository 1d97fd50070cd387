"""The tree cache: prompt once per sentence, generated keys appended, and dropped when no beam descends from them.

Shapes: `B` sentences, `M` beams, `P` prompt positions, `T` generated steps, `H` key heads, `D` head size.
After the prompt's slots each step opens `M`, one for what each beam row writes. Which slots a beam may see is the
boolean ancestry `[B, M, used]`; choosing beams reorders the ancestry, nothing else. Beams soon have most ancestors in
common, so when the slots are used up those on no beam's path make room: of T steps little more than T slots stay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.retained import RetainedBuffers
from fastgen.cache.tree_layer import TreeLayer
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE

FIRST_STEPS = 64  # steps allocated at first
# A sentence that has left saves its share of every step; letting one out copies all the others' keys.
_EVICT_FROM = 1 / 16  # of the sentences still here
_EVICT_FROM_STATIC = 1 / 2  # then the step has to be captured anew
_WORTH_PRUNING = 0.9  # prune if at most this part of the generated slots stays


class BeamTree:
    """The state all layers share: how far generation is, and who descends from whom."""

    def __init__(
        self, batch: int, beams: int, max_steps: int, buffers: Buffers | None = None, is_static: bool = False
    ) -> None:
        """`buffers`: where the layers take their memory from.

        `is_static`: until `epoch` changes, all that a step reads and writes keeps its shape and its address, so that
        the step can be captured once and replayed. Keys and masks then span all slots allocated.
        """
        self.is_static = is_static
        self.buffers = Buffers(None) if buffers is None else buffers
        self.batch, self.beams, self.max_steps = batch, beams, max_steps
        self.capacity = max(1, min(max_steps, FIRST_STEPS)) * beams  # generated slots allocated
        self.prompt_length = 0
        self.steps = 0  # steps opened so far
        self.generated = 0  # slots in use beyond the prompt's
        self._was_pruned = False
        self.layers: list[TreeLayer] = []
        self.rotations: TreeLayer | None = None  # cosines and sines of the slots' positions, where a layer needs them
        self._of_step: dict[Hashable, Tensor] = {}  # derived in this step
        self.evictions = 0  # times that sentences have left
        self._first = batch, self.capacity
        self.retained = RetainedBuffers(self.buffers)

    @property
    def epoch(self) -> Hashable:
        """See `is_static`."""
        return self.evictions, self.capacity

    def begin_decoding(self, prompt_mask: Tensor | None = None, device: torch.device | None = None) -> None:
        """Begin decoding: the layers hold the prompt; `prompt_mask` `[B, P]`, nonzero = attend.

        `device`: where masks live, needed if there is no layer yet; by default the first layer's.
        """
        prompt_length = self.prompt_length
        device = device or next(tensor.device for layer in self.layers for tensor in layer.stored())
        slots = prompt_length + self.capacity
        self._ancestry = torch.zeros(self.batch, self.beams, slots, dtype=torch.bool, device=device)
        self._ancestry[:, :, :prompt_length] = True if prompt_mask is None else prompt_mask[:, None, :].bool()
        self._own = torch.eye(self.beams, dtype=torch.bool, device=device)
        self._positions = torch.arange(slots, device=device)[None]  # those of generated slots are set as they open
        if self.is_static:
            self._positions = self._positions.repeat(self.batch, 1)
            self.slots = torch.zeros(self.beams, dtype=torch.int64, device=device)  # those of this step
            self._clock = torch.zeros((), dtype=torch.int64, device=device)  # `length`, where a replayed step sees it

    def retain_buffers(self, is_captured: Callable[[Hashable], bool], fits: Callable[[int], bool]) -> None:
        """From now on, keep the buffers that this static tree, which has just begun, outgrows.

        That is, where they fit (`fits`), and where a step of their epoch `is_captured`: later calls can replay it once
        `restore_first_buffers` has been called.
        """
        self.retained.begin(self.epoch, self._parts(), is_captured, fits)

    def _parts(self) -> Iterator[tuple[Hashable, Tensor]]:
        """All buffers that are exchanged for larger ones when the tree grows, by their names."""
        yield "ancestry", self._ancestry
        yield "positions", self._positions
        for layer in self._all():
            for number, tensor in enumerate(layer.stored()):
                yield (layer, number), tensor

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory with anything in it, perhaps what was retained of an earlier call's same epoch."""
        if not self.retained.is_on or self.evictions:  # how many have left, it will not have in common with others
            return self.buffers.empty(shape, dtype, device)
        return self.retained.empty(self.epoch, name, shape, dtype, device)

    @property
    def _is_first_size(self) -> bool:
        return self.capacity == self._first[1]

    def restore_first_buffers(self) -> None:
        """Be where the tree was when it was told to `retain_buffers`, for `reset_from`; what it holds is no matter."""
        self.retained.drop_unless_worth(self.epoch, self._is_first_size)
        (self.batch, self.capacity), self.evictions = self._first, 0
        here = self.retained.of(self.epoch)
        self._ancestry, self._positions = here["ancestry"], here["positions"]
        for layer in self._all():
            layer.restore_first_buffers(here)

    def reset_from(self, other: BeamTree) -> None:
        """Begin again, in place, with the prompt of another static tree, of the same shapes that has just begun; it may
        have no layers yet if it has no prompt."""
        self._ancestry.copy_(other._ancestry)
        self.steps = self.generated = 0
        self._was_pruned = False
        self._of_step.clear()
        theirs: Sequence[TreeLayer | None] = other._all() or [None] * len(self._all())
        for layer, its in zip(self._all(), theirs, strict=True):
            layer.reset_from(its)

    @property
    def used(self) -> int:
        """Slots in use: the prompt's, those that stayed when the tree was pruned, and `M` for each step since."""
        return self.prompt_length + self.generated

    @property
    def width(self) -> int:
        """Slots that a step's keys and masks span: those in use, or all of a static tree's."""
        return self.prompt_length + (self.capacity if self.is_static else self.generated)

    @property
    def length(self) -> int:
        """Tokens on the path of one beam, those of the step under way not counted."""
        return self.prompt_length + max(self.steps - 1, 0)

    @property
    def position(self) -> int | Tensor:
        """`length` for what is computed within a step: of a static tree an int64 tensor without dimensions."""
        return self._clock if self.is_static else self.length

    def advance(self) -> None:
        """Open the next step's slots; each beam sees its own."""
        if self._is_full():
            self._make_room()
        start = self.used
        self.steps += 1
        self.generated += self.beams
        self._ancestry[:, :, start : self.used] = self._own
        self._positions[:, start : self.used].fill_(self.length)
        if self.is_static:
            torch.arange(start, self.used, out=self.slots)
            self._clock.fill_(self.length)
        self._of_step.clear()

    def _is_full(self) -> bool:
        return self.generated + self.beams > self.capacity

    def _make_room(self) -> None:
        """Drop the slots on no beam's path or, where that frees too few, allocate more."""
        slots = self._ancestors()
        stay = slots.shape[1]
        if stay <= _WORTH_PRUNING * self.generated:
            self._prune(slots)
        if self.capacity - self.generated < max(self.beams, stay // 8):  # or it would be full again at once
            self.retained.leave(self.epoch, self._is_first_size)
            # Twice as many, unless pruning will soon make some of them idle.
            grown = self.capacity * 5 // 4 if self._was_pruned else self.capacity * 2
            self.capacity = min(self.max_steps * self.beams, max(grown, self.capacity + self.beams))
            self._ancestry = self._padded("ancestry", self._ancestry)
            self._positions = self._padded("positions", self._positions)
            for layer in self._all():
                layer.grow()

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        """`[..., slots]` with zeros for the slots that are new."""
        slots = self.prompt_length + self.capacity
        padded = self.room(name, (*tensor.shape[:-1], slots), tensor.dtype, tensor.device)
        padded[..., tensor.shape[-1] :] = 0
        padded[..., : tensor.shape[-1]] = tensor
        return padded

    def _ancestors(self) -> Tensor:
        """The generated slots on some beam's path, in order, int64 `[B, W]`.

        Each sentence has equally many: those with fewer fill up with slots that nobody sees.
        """
        is_ancestor = self.ancestry()[:, :, self.prompt_length :].any(1)  # bool [B, generated]
        most = int(is_ancestor.sum(1).max()) if is_ancestor.numel() else 0
        return is_ancestor.sort(dim=1, descending=True, stable=True)[1][:, :most]

    def _prune(self, slots: Tensor) -> None:
        """Keep these of the generated slots, int64 `[B, W]`, in this order."""
        start, end = self.prompt_length, self.prompt_length + slots.shape[1]
        beams = slots[:, None].expand(-1, self.beams, -1)
        self._ancestry[:, :, start:end] = self._ancestry[:, :, start:].gather(2, beams)
        self._ancestry[:, :, end:] = False
        if len(self._positions) < self.batch:
            self._positions = self._positions.repeat(self.batch, 1)  # from now on each its own
        self._positions[:, start:end] = self._positions[:, start:].gather(1, slots)
        self.generated, self._was_pruned = slots.shape[1], True
        for layer in self._all():
            layer.prune(slots)

    def forget_masks(self) -> None:
        """Derive them anew: a step begins, or begins again after an attempt in which nothing was computed."""
        self._of_step.clear()

    def reorder(self, parents: Tensor) -> None:
        """Beam `(b, m)` continues row `parents[b*M + m]` (int64 `[B*M]`, rows counted over the batch)."""
        rows = self._ancestry[:, :, : self.used].flatten(0, 1).index_select(0, parents)
        self._ancestry[:, :, : self.used] = rows.unflatten(0, (self.batch, self.beams))

    def should_evict(self, num_finished: int) -> bool:
        """Whether so many sentences, of those still here, are worth letting out now."""
        part = _EVICT_FROM_STATIC if self.is_static else _EVICT_FROM
        return num_finished > 0 and num_finished >= int(self.batch * part)

    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these (int64 `[B']`), from the ancestry and from every layer."""
        self._ancestry = self._ancestry.index_select(0, sentences)
        if len(self._positions) > 1:
            self._positions = self._positions.index_select(0, sentences)
        self.retained.leave(self.epoch, self._is_first_size)
        self.batch = len(sentences)
        self.evictions += 1
        for layer in self._all():
            layer.select(sentences)
        self._of_step.clear()

    def positions(self) -> Tensor:
        """The logical position of each slot, int64 `[B or 1, width]`; any, where nobody sees the slot."""
        return self._positions[:, : self.width]

    def ancestry(self) -> Tensor:
        """Which slots each beam sees, bool `[B, M, width]`."""
        return self._ancestry[:, :, : self.width]

    def paths(self) -> Tensor:
        """The slots on each beam's path in order of position, int64 `[B*M, tokens]`; padding is included."""
        prompt = torch.arange(self.prompt_length, device=self._ancestry.device)
        prompt = prompt.expand(self.batch * self.beams, -1)
        seen = self.ancestry()[:, :, self.prompt_length :]  # one slot of each step
        positions = self.positions()[:, None, self.prompt_length :].expand_as(seen)
        last = self.prompt_length + self.max_steps
        generated = torch.where(seen, positions, last).argsort(-1)[:, :, : self.steps].flatten(0, 1)
        return torch.cat([prompt, self.prompt_length + generated], dim=1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[B, 1, M, width]` of this step: 0 = attend, the dtype's minimum = don't."""

        def make() -> Tensor:
            seen = self.ancestry()
            if window is not None:
                seen = seen & (self.position - self.positions()[:, None] < window)
            return additive_mask(seen, dtype)[:, None]

        return self.of_step((window, dtype), make)

    def of_step(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` returns, made once in a step: what its layers derive from the slots."""
        if key not in self._of_step:
            self._of_step[key] = make()
        return self._of_step[key]

    def close(self) -> None:
        """End the call: the layers' buffers are free, now and not when the garbage collector finds the tree."""
        for layer in self._all():
            layer.clear()
        self.retained.drop()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._all())

    @property
    def retained_bytes(self) -> int:
        """All memory that the tree keeps, what it has outgrown included."""
        return self.retained.nbytes if self.retained.is_on else self.nbytes

    def _all(self) -> list[TreeLayer]:
        return self.layers if self.rotations is None else [*self.layers, self.rotations]


def additive_mask(attend: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to the scores: 0 where True, the dtype's minimum elsewhere."""
    zeros = torch.zeros((), dtype=dtype, device=attend.device)
    return torch.where(attend, zeros, torch.finfo(dtype).min)
