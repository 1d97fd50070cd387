"""The state that a call's steps read and write, besides the model and the inputs of each step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fastgen.cache.slim.latent import identity_of
from fastgen.cache.tree import BeamTree
from fastgen.decoding.static_beam_search import StaticBeamSearch
from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.transformers.cache.tree_cache import TreeEncoderDecoderCache
from fastgen.optimizer.transformers.model.session import Session


@dataclass
class State:
    """The state that captured steps read and write; a later call of the same shapes fills it anew."""

    tree: BeamTree
    session: Session
    cache: Any  # the tree as the host's cache, with the keys and values of cross-attention
    encoder_outputs: Any
    source_mask: Tensor | None  # [B, N]
    prepared_mask: tuple[Tensor, Tensor] | None  # that mask, and the mask given to the model instead
    search: tuple[Hashable, StaticBeamSearch] | None  # if the search's steps are captured, too

    def __post_init__(self) -> None:
        self._before: tuple[Any, ...] | None = None  # the source's buffers, before others replace them

    @property
    def products(self) -> LinearDispatcher:
        return self.session.products

    def fill(self, other: State) -> None:
        """Begin anew, in place, with the prompt and the encoder output of `other`, a state of the same `shape`."""
        self.tree.reset_from(other.tree)
        for mine, theirs in zip(self._source(), other._source(), strict=True):
            mine.copy_(theirs)
        if self.source_mask is not None:
            self.session.write_source_mask(self.source_mask[:, None, None].bool())

    def hand_to(self, decoder: Any) -> None:
        """Give all of it to a `TreeDecoder`, which has attributes of these names."""
        for field in fields(self):
            setattr(decoder, field.name, getattr(self, field.name))

    def retain_buffers(self) -> None:
        """Note the source's buffers, as sentences are about to leave and others will replace these buffers."""
        tensors = [layer.tensors for layer in self._source_layers()]
        self._before = tensors, self.session.source_mask, self.session.slim.source

    def restore_first_buffers(self) -> None:
        """Return to the buffers from before the tree grew and, after `retain_buffers`, before sentences left."""
        self.tree.restore_first_buffers()
        if self.search is not None:
            self.search[1].restore_first_buffers()
        if self._before is None:
            return
        tensors, self.session.source_mask, self.session.slim.source = self._before
        for layer, its in zip(self._source_layers(), tensors, strict=True):
            layer.tensors = its
        self._before = None

    def shape(self) -> Hashable:
        """A key that must be equal for two states if one is to be filled from the other; None if none can be."""
        tree, tensors = self.tree, self.shape_of_tensors()
        return tensors and (
            (type(tree), tree.batch, tree.beams, tree.max_steps, tree.capacity, tree.prompt_length),
            tuple((layer.window, identity_of(layer.slim)) for layer in tree.layers),
            tuple(identity_of(layer.slim) for layer in self._source_layers()),
            tensors,
        )

    def shape_of_tensors(self) -> Hashable:
        """The part of `shape` that is of the buffers alone."""
        outputs = self.encoder_outputs
        if outputs is not None and not (isinstance(outputs, dict) and all(map(torch.is_tensor, outputs.values()))):
            return None  # outputs of all layers, which the user has asked for
        tensors = tuple((x.shape, x.dtype, x.device, x.is_inference()) for x in self._tensors())
        return tensors, self.source_mask is None

    def nbytes(self) -> int:
        search = 0 if self.search is None else self.search[1].live.nbytes
        return self.tree.retained_bytes + sum(tensor.nbytes for tensor in self._source()) + search

    def close(self) -> None:
        """Free all keys and values now: there are reference cycles, and the garbage collector may come late."""
        self.tree.close()
        self.session.slim.source = None
        if hasattr(self.cache, "close"):
            self.cache.close()

    def _source_layers(self) -> list[Any]:
        return self.cache.cross_attention_cache.layers if isinstance(self.cache, TreeEncoderDecoderCache) else []

    def _tensors(self) -> list[Tensor]:
        return [*self._source(), *(tensor for layer in self.tree.layers for tensor in layer.stored())]

    def _source(self) -> list[Tensor]:
        """All tensors of the source that a step may read: the encoder output, the mask, keys and values."""
        source = [] if self.encoder_outputs is None else [*self.encoder_outputs.values()]
        source += [] if self.source_mask is None else [self.source_mask]
        return source + (self.cache.stored() if isinstance(self.cache, TreeEncoderDecoderCache) else [])
