"""The tree cache: stores a prompt once per sentence, appends generated keys, drops those on no beam's path.

Shapes: `B` sentences, `M` beams, `P` prompt positions, `T` generated steps, `H` key heads, `D` head size.
After the prompt's slots each step opens `M`, one for the key and value of each beam. Which slots a beam may see is the
boolean ancestry `[B, M, used]`; choosing beams reorders the ancestry, nothing else. Beams soon share most ancestors, so
when all slots are used those on no beam's path are dropped: after T steps little more than T generated slots stay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.eviction import moves_to
from fastgen.cache.retained import RetainedBuffers
from fastgen.cache.tree_layer import TreeLayer
from fastgen.memory.buffers import Buffers

__phase__ = phases.CACHE

FIRST_STEPS = 64  # steps allocated at first
# Evicting a finished sentence saves that sentence's share of every step, but costs some twenty small operations and, in
# a static tree and on a GPU, copies the keys of all others.
_EVICT_FROM = 1 / 16  # of the live sentences have to have finished
_EVICT_FROM_STATIC = 1 / 2  # the same for a static tree, where the step has to be captured anew
_WORTH_PRUNING = 0.9  # prune if at most this part of the generated slots stays


class BeamTree:
    """The state that all layers of a call share: the slots in use, and which of them each beam may see."""

    reads_several = False  # a step's rows may be several tokens of one sentence

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
        self._of_step: dict[Hashable, Tensor] = {}  # masks and the like, derived in this step
        self.evictions = 0  # times that sentences have left
        self._first = batch, self.capacity
        self.retained = RetainedBuffers(self.buffers)

    @property
    def epoch(self) -> Hashable:
        """A key that changes when buffers change shape or address: see `is_static`."""
        return self.evictions, self.capacity

    def begin_decoding(self, prompt_mask: Tensor | None = None, device: torch.device | None = None) -> None:
        """Begin decoding, once the layers hold the prompt; `prompt_mask`: padding mask `[B, P]`, nonzero = attend.

        `device`: of the masks, needed if there is no layer yet; by default the first layer's.
        """
        prompt_length = self.prompt_length
        device = device or next(tensor.device for layer in self.layers for tensor in layer.stored())
        slots = prompt_length + self.capacity
        self._ancestry = torch.zeros(self.batch, self.beams, slots, dtype=torch.bool, device=device)
        self._ancestry[:, :, :prompt_length] = True if prompt_mask is None else prompt_mask[:, None, :].bool()
        self._own = torch.eye(self.beams, dtype=torch.bool, device=device)
        self._positions = torch.arange(slots, device=device)[None]  # positions of generated slots are set as they open
        if self.is_static:
            self._positions = self._positions.repeat(self.batch, 1)
            self.slots = torch.zeros(self.beams, dtype=torch.int64, device=device)  # the slots of this step
            self._clock = torch.zeros((), dtype=torch.int64, device=device)  # `length`, where a replayed step sees it

    def retain_buffers(self, is_captured: Callable[[Hashable], bool], fits: Callable[[int], bool]) -> None:
        """Keep the buffers that this static tree outgrows from now on; called when decoding has just begun.

        Only buffers that fit in memory (`fits`) and on which a step was captured (`is_captured`, asked with the epoch)
        are kept: later calls can replay that step after `restore_first_buffers`.
        """
        self.retained.begin(self.epoch, self._parts(), is_captured, fits)

    def _parts(self) -> Iterator[tuple[Hashable, Tensor]]:
        """All buffers that are exchanged for larger ones when the tree grows, with their names."""
        yield "ancestry", self._ancestry
        yield "positions", self._positions
        for layer in self._all():
            for number, tensor in enumerate(layer.stored()):
                yield (layer, number), tensor

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory, perhaps a buffer retained from an earlier call in the same epoch."""
        if not self.retained.is_on or self.evictions:  # other calls will not evict the same numbers of sentences
            return self.buffers.empty(shape, dtype, device)
        return self.retained.empty(self.epoch, name, shape, dtype, device)

    @property
    def _is_first_size(self) -> bool:
        return self.capacity == self._first[1]

    def restore_first_buffers(self) -> None:
        """Return to the buffers that the tree had at `retain_buffers`, whatever they contain; `reset_from` follows."""
        self.retained.drop_unless_worth(self.epoch, self._is_first_size)
        (self.batch, self.capacity), self.evictions = self._first, 0
        here = self.retained.of(self.epoch)
        self._ancestry, self._positions = here["ancestry"], here["positions"]
        for layer in self._all():
            layer.restore_first_buffers(here)

    def reset_from(self, other: BeamTree) -> None:
        """Begin again, in place, with the prompt of `other`, a static tree of the same shapes that has just begun;
        without a prompt, `other` may have no layers yet."""
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
        """Number of slots that a step's keys and masks span: those in use or, in a static tree, all allocated."""
        return self.prompt_length + (self.capacity if self.is_static else self.generated)

    @property
    def length(self) -> int:
        """Number of tokens on the path of one beam, the current step's token not counted."""
        return self.prompt_length + max(self.steps - 1, 0)

    @property
    def position(self) -> int | Tensor:
        """`length` for computations within a step: in a static tree an int64 tensor without dimensions."""
        return self._clock if self.is_static else self.length

    def advance(self) -> None:
        """Open the next step's slots, one for each beam, which alone sees it."""
        if self._is_full():
            self._make_room()
        start = self.used
        self.steps += 1
        self.generated += self.beams
        self._ancestry[:, :, start : self.used] = self._own
        self._positions[:, start : self.used].fill_(self.length)
        if self.is_static:
            torch.arange(start, self.used, out=self.slots, device=self.slots.device)
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

        Each sentence has equally many: those with fewer are filled up with slots that no beam sees.
        """
        is_ancestor = self.ancestry()[:, :, self.prompt_length :].any(1)  # bool [B, generated]
        most = int(is_ancestor.sum(1).max()) if is_ancestor.numel() else 0
        return is_ancestor.sort(dim=1, descending=True, stable=True)[1][:, :most]

    def _prune(self, slots: Tensor) -> None:
        """Keep only the generated slots `slots`, int64 `[B, W]`, in this order."""
        start, end = self.prompt_length, self.prompt_length + slots.shape[1]
        beams = slots[:, None].expand(-1, self.beams, -1)
        self._ancestry[:, :, start:end] = self._ancestry[:, :, start:].gather(2, beams)
        self._ancestry[:, :, end:] = False
        if len(self._positions) < self.batch:
            self._positions = self._positions.repeat(self.batch, 1)  # from now on each sentence has other positions
        self._positions[:, start:end] = self._positions[:, start:].gather(1, slots)
        self.generated, self._was_pruned = slots.shape[1], True
        for layer in self._all():
            layer.prune(slots)

    def forget_masks(self) -> None:
        """Forget this step's masks: a step begins, or begins again after an attempt that computed nothing."""
        self._of_step.clear()

    def reorder(self, parents: Tensor) -> None:
        """Beam `(b, m)` continues row `parents[b*M + m]` (int64 `[B*M]`, rows counted over the batch)."""
        rows = self._ancestry[:, :, : self.used].flatten(0, 1).index_select(0, parents)
        self._ancestry[:, :, : self.used] = rows.unflatten(0, (self.batch, self.beams))

    def should_evict(self, num_finished: int) -> bool:
        """Whether to evict now, when `num_finished` of the live sentences have finished."""
        part = _EVICT_FROM_STATIC if self.is_static else _EVICT_FROM
        return num_finished > 0 and num_finished >= int(self.batch * part)

    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these (int64 `[B']`), from the ancestry and from every layer.

        In the order of `eviction.staying`, little is copied.
        """
        moves = None if self.is_static else moves_to(sentences)  # captured steps may be kept with the whole buffers
        self._ancestry = self._ancestry.index_select(0, sentences)
        if len(self._positions) > 1:
            self._positions = self._positions.index_select(0, sentences)
        self.retained.leave(self.epoch, self._is_first_size)
        self.batch = len(sentences)
        self.evictions += 1
        for layer in self._all():
            layer.select(sentences, moves)
        self._of_step.clear()

    def positions(self) -> Tensor:
        """The logical position of each slot, int64 `[B or 1, width]`; arbitrary where no beam sees the slot."""
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
        last = self.prompt_length + self.steps
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
        """The result of `make`, called once a step for each key: tensors that all layers derive from the slots."""
        if key not in self._of_step:
            self._of_step[key] = make()
        return self._of_step[key]

    def close(self) -> None:
        """End the call: free all tensors now, not when the garbage collector finds the tree, which its layers know."""
        for layer in self._all():
            layer.clear()
        self.retained.drop()
        self._of_step.clear()
        for name in [name for name, value in vars(self).items() if isinstance(value, Tensor)]:
            delattr(self, name)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._all())

    @property
    def retained_bytes(self) -> int:
        """Bytes of all memory that the tree keeps, outgrown buffers included."""
        return self.retained.nbytes if self.retained.is_on else self.nbytes

    def _all(self) -> list[TreeLayer]:
        return self.layers if self.rotations is None else [*self.layers, self.rotations]


def additive_mask(attend: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into one that is added to scores: 0 where True, the dtype's minimum elsewhere."""
    zeros = torch.zeros((), dtype=dtype, device=attend.device)
    return torch.where(attend, zeros, torch.finfo(dtype).min)
