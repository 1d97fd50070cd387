"""The tree cache: prompt once per sentence, generated keys appended and never moved.

Shapes: `B` sentences, `M` beams, `P` prompt positions, `T` generated steps, `H` key heads, `D` head size.
Slot `P + t*M + m` of a sentence holds what its beam row `m` wrote at step `t`. Which slots a beam may
see is the boolean ancestry `[B, M, P + T*M]`; choosing beams reorders the ancestry, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_STEPS = 64  # steps allocated at first; doubled whenever they are used up


class TreeLayer:
    """Keys and values of one layer, `[B, H, capacity, D]`; the first `tree.used` slots are in use."""

    def __init__(self, tree: BeamTree, window: int | None = None) -> None:
        self.tree = tree
        self.window = window  # sliding-window size in tokens, None: unlimited
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Store the prompt's keys and values, `[B, H, P, D]`."""
        self.tree.prompt_length = keys.shape[2]
        capacity = keys.shape[2] + self.tree.steps_allocated * self.tree.beams
        self.keys, self.values = _grown(keys, capacity), _grown(values, capacity)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values and return all slots in use, `[B, H, used, D]`.

        `keys`: one row per beam, `[B*M, H, 1, D]`, or beams as positions, `[B, H, M, D]`.
        """
        tree = self.tree
        stored_keys, stored_values = self.stored()
        start, used = tree.used - tree.beams, tree.used
        if used > stored_keys.shape[2]:
            capacity = tree.prompt_length + tree.steps_allocated * tree.beams
            self.keys = stored_keys = _grown(stored_keys[:, :, :start], capacity)
            self.values = stored_values = _grown(stored_values[:, :, :start], capacity)
        stored_keys[:, :, start:used] = _beams_as_positions(keys, tree.beams)
        stored_values[:, :, start:used] = _beams_as_positions(values, tree.beams)
        return stored_keys[:, :, :used], stored_values[:, :, :used]

    def stored(self) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, which the prompt has filled by now."""
        assert self.keys is not None and self.values is not None, "the prompt comes first"
        return self.keys, self.values

    def keep(self, sentences: Tensor) -> None:
        """Keep only these sentences (int64 `[B']`), and of them only the slots in use."""
        if self.keys is None or self.values is None:
            return
        capacity, used = self.keys.shape[2], self.tree.used
        self.keys = _grown(self.keys[:, :, :used].index_select(0, sentences), capacity)
        self.values = _grown(self.values[:, :, :used].index_select(0, sentences), capacity)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)


class BeamTree:
    """The state all layers share: how far generation is, and who descends from whom."""

    def __init__(self, batch: int, beams: int, max_steps: int) -> None:
        self.batch, self.beams, self.max_steps = batch, beams, max_steps
        self.steps_allocated = max(1, min(max_steps, FIRST_STEPS))
        self.prompt_length = 0
        self.steps = 0  # steps opened so far
        self.layers: list[TreeLayer] = []
        self._masks: dict[tuple[object, ...], Tensor] = {}  # of this step

    def plant(self, prompt_mask: Tensor | None = None, device: torch.device | None = None) -> None:
        """Begin decoding: the layers hold the prompt; `prompt_mask` `[B, P]`, nonzero = attend.

        `device`: where masks live, needed if there is no layer yet; by default the first layer's.
        """
        prompt_length, device = self.prompt_length, device or self.layers[0].stored()[0].device
        shape = (self.batch, self.beams, prompt_length + self.max_steps * self.beams)
        self._ancestry = torch.zeros(shape, dtype=torch.bool, device=device)
        self._ancestry[:, :, :prompt_length] = True if prompt_mask is None else prompt_mask[:, None, :].bool()
        steps = torch.arange(self.max_steps * self.beams, device=device) // self.beams
        self._positions = torch.cat([torch.arange(prompt_length, device=device), prompt_length + steps])

    @property
    def used(self) -> int:
        """Slots in use: the prompt's and `M` for each step."""
        return self.prompt_length + self.steps * self.beams

    @property
    def length(self) -> int:
        """Tokens on the path of one beam, those of the step under way not counted."""
        return self.prompt_length + max(self.steps - 1, 0)

    def advance(self) -> None:
        """Open the next step's slots; each beam sees its own."""
        start = self.used
        self.steps += 1
        if self.steps > self.steps_allocated:
            self.steps_allocated = min(self.max_steps, 2 * self.steps_allocated)
        own = torch.eye(self.beams, dtype=torch.bool, device=self._ancestry.device)
        self._ancestry[:, :, start : self.used] = own
        self._masks.clear()

    def reorder(self, parents: Tensor) -> None:
        """Beam `(b, m)` continues row `parents[b*M + m]` (int64 `[B*M]`, rows counted over the batch)."""
        rows = self._ancestry[:, :, : self.used].flatten(0, 1).index_select(0, parents)
        self._ancestry[:, :, : self.used] = rows.unflatten(0, (self.batch, self.beams))

    def keep(self, sentences: Tensor) -> None:
        """Drop all sentences but these (int64 `[B']`), from the ancestry and from every layer."""
        self._ancestry = self._ancestry.index_select(0, sentences)
        self.batch = len(sentences)
        for layer in self.layers:
            layer.keep(sentences)
        self._masks.clear()

    def positions(self) -> Tensor:
        """The logical position of each slot in use, int64 `[used]`."""
        return self._positions[: self.used]

    def ancestry(self) -> Tensor:
        """Which slots in use each beam sees, bool `[B, M, used]`."""
        return self._ancestry[:, :, : self.used]

    def paths(self) -> Tensor:
        """The slots on each beam's path in order of position, int64 `[B*M, tokens]`; padding is included."""
        prompt = torch.arange(self.prompt_length, device=self._ancestry.device)
        prompt = prompt.expand(self.batch * self.beams, -1)
        steps = self.ancestry()[:, :, self.prompt_length :].unflatten(2, (self.steps, self.beams))
        generated = steps.int().argmax(-1).flatten(0, 1)  # exactly one slot per step is an ancestor
        offsets = self.prompt_length + torch.arange(self.steps, device=generated.device) * self.beams
        return torch.cat([prompt, generated + offsets], dim=1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[B, 1, M, used]` of this step: 0 = attend, the dtype's minimum = don't."""
        key = (window, dtype)
        if key not in self._masks:
            seen = self.ancestry()
            if window is not None:
                seen = seen & (self.length - self.positions() < window)
            self._masks[key] = additive_mask(seen, dtype)[:, None]
        return self._masks[key]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def additive_mask(attend: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to the scores: 0 where True, the dtype's minimum elsewhere."""
    zeros = torch.zeros((), dtype=dtype, device=attend.device)
    return torch.where(attend, zeros, torch.finfo(dtype).min)


def _beams_as_positions(rows: Tensor, beams: int) -> Tensor:
    """`[B*M, H, 1, D]` -> `[B, H, M, D]`; the latter is returned as it is."""
    if rows.shape[2] == beams:
        return rows
    return rows.unflatten(0, (-1, beams)).squeeze(3).transpose(1, 2)


def _grown(tensor: Tensor, capacity: int) -> Tensor:
    """A copy with room for `capacity` slots along dimension 2."""
    batch, heads, used, size = tensor.shape
    grown = tensor.new_empty(batch, heads, capacity, size)
    grown[:, :, :used] = tensor
    return grown
