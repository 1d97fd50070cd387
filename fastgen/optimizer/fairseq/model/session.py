"""The state of one generation: the tree, and the keys and values of cross-attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.slim.latent import Slim, kind_of
from fastgen.cache.tree import BeamTree
from fastgen.cache.wide_tree import WideTree

__phase__ = phases.CACHE


class Source:
    """The tensors that cross-attention of one layer reads, one row per sentence."""

    def __init__(self, stored: tuple[Tensor, ...], bias: Tensor | None, slim: Slim | None = None) -> None:
        """`stored`: keys and values or, with a `slim` cache, what it stores, each `[B, H, N, D]`; `bias`
        `[B, 1, 1, N]` is added to the scores."""
        self.stored, self.bias, self.slim = stored, bias, slim


class Session:
    """The state of one call of `_generate`. All models of an ensemble have the same beams, so they share one tree."""

    def __init__(self, tree: BeamTree, pad: int | None, device: torch.device) -> None:
        """`pad`: the padding token, whose keys nobody sees; None if the models hide nothing."""
        self.tree = tree
        self.sources: list[Source] = []
        self.cache_bytes = 0  # the largest so far
        self.cache = ""  # what is stored for each position, in one word
        self.device, self._pad = device, pad
        self._whole: list[tuple[tuple[Tensor, ...], Tensor | None]] | None = None  # of sources before sentences left

    def begin_decoding(self) -> None:
        """Begin decoding, once the prompt, if there is one, has been read."""
        self.tree.begin_decoding(device=self.device)

    def advance(self, last: Tensor) -> None:
        """Open the next step, in which every beam reads its last token, int64 `[B*M]`."""
        tree = self.tree
        tree.advance()
        if self._pad is None or isinstance(tree, WideTree):
            return  # paths hide nothing: beams that are fed padding have a score of -inf, and no end (`tree_class`)
        # A beam that was fed padding writes keys that no beam may see, not even the beam itself.
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
            if tree.retained.is_on and self._whole is None:
                self._whole = [(source.stored, source.bias) for source in self.sources]
            stay = rows[:: tree.beams] // tree.beams
            tree.select(stay)
            kept = {name: tensor.index_select(0, stay) for name, tensor in self._of_sources().items()}
            for source in self.sources:
                source.stored = tuple(kept[id(tensor)] for tensor in source.stored)
                source.bias = None if source.bias is None else kept[id(source.bias)]
        first = torch.arange(batch, device=rows.device)[:, None] * tree.beams
        tree.reorder((rows.view(batch, tree.beams) % tree.beams + first).flatten())
        return stay

    def restore_first_buffers(self) -> None:
        """Return to the buffers that the session had before the tree grew or sentences left."""
        self.tree.restore_first_buffers()
        if self._whole is not None:
            for source, (stored, bias) in zip(self.sources, self._whole, strict=True):
                source.stored, source.bias = stored, bias
            self._whole = None

    def stored(self) -> list[Tensor]:
        """All tensors of the cross-attention caches, masks included."""
        return [*self._of_sources().values()]

    def _of_sources(self) -> dict[int, Tensor]:
        """The tensors of all sources by id, each once, as layers share some."""
        tensors = [tensor for source in self.sources for tensor in (*source.stored, source.bias)]
        return {id(tensor): tensor for tensor in tensors if tensor is not None}

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + sum(tensor.nbytes for tensor in self.stored())

    @property
    def retained_bytes(self) -> int:
        """Bytes that the session keeps, buffers that the tree has outgrown included."""
        return self.tree.retained_bytes + sum(tensor.nbytes for tensor in self.stored())

    def measure(self) -> None:
        """Note how many bytes the caches take, and what they store."""
        self.cache_bytes = max(self.cache_bytes, self.nbytes)
        self.cache = kind_of((layer.slim for layer in self.tree.layers), (source.slim for source in self.sources))
