"""The state of one generation: the tree, and cross-attention's keys and values beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.cache.tree import BeamTree


class Source:
    """Cross-attention's keys and values of one layer, one row per sentence."""

    def __init__(self, keys: Tensor, values: Tensor, bias: Tensor | None) -> None:
        """Keys and values `[B, H, N, D]`; `bias` `[B, 1, 1, N]` is added to the scores."""
        self.keys, self.values, self.bias = keys, values, bias

    def keep(self, sentences: Tensor) -> None:
        """Drop all sentences but these, int64 `[B']`."""
        self.keys = self.keys.index_select(0, sentences)
        self.values = self.values.index_select(0, sentences)

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))


class Session:
    """One call of `_generate`. All models of an ensemble grow the same beams, so they share the ancestry."""

    def __init__(self, tree: BeamTree, pad: int, device: torch.device) -> None:
        self.tree = tree
        self.sources: list[Source] = []
        self.cache_bytes = 0  # the most so far
        self._pad, self._device = pad, device

    def plant(self) -> None:
        """Begin decoding: the prompt, if there is one, has been read."""
        self.tree.plant(device=self._device)

    def advance(self, last: Tensor) -> None:
        """Open the next step, in which every beam reads its last token, int64 `[B*M]`."""
        tree = self.tree
        tree.advance()
        # A beam that was fed padding writes keys that nobody may see, itself included.
        own = tree.ancestry()[:, :, tree.used - tree.beams : tree.used]
        own &= last.ne(self._pad).view(tree.batch, 1, tree.beams)

    def reorder(self, rows: Tensor) -> Tensor | None:
        """Continue the beams that were in these rows, int64 `[B'*M]`.

        Returns the sentences that stay, int64 `[B']`, if some have left.
        """
        tree, stay = self.tree, None
        batch = len(rows) // tree.beams
        if batch != tree.batch:
            self.measure()
            stay = rows[:: tree.beams] // tree.beams
            tree.keep(stay)
            for source in self.sources:
                source.keep(stay)
            biases = {id(source.bias): source.bias for source in self.sources if source.bias is not None}
            kept = {name: bias.index_select(0, stay) for name, bias in biases.items()}
            for source in self.sources:
                source.bias = kept.get(id(source.bias))
        first = torch.arange(batch, device=rows.device)[:, None] * tree.beams
        tree.reorder((rows.view(batch, tree.beams) % tree.beams + first).flatten())
        return stay

    def measure(self) -> None:
        """Note how many bytes keys and values take."""
        self.cache_bytes = max(self.cache_bytes, self.tree.nbytes + sum(source.nbytes for source in self.sources))
