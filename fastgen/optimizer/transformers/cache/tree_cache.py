"""The tree as a transformers `Cache`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
)

from fastgen import phases
from fastgen.cache.eviction import in_place, moves_to
from fastgen.cache.row_pool import RowPool
from fastgen.cache.slim.latent import Slim
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.transformers.cache import recurrent
from fastgen.optimizer.transformers.cache.hosts_caches import KEYS_ALONE
from fastgen.optimizer.transformers.cache.slim import SlimCaches
from fastgen.optimizer.transformers.model.session import Session

__phase__ = phases.CACHE


class _Layer(CacheLayerMixin):
    """A layer of the tree under the host's names."""

    is_sliding = False  # a sliding window is part of the tree's mask

    def __init__(self, session: Session, layer: TreeLayer) -> None:
        super().__init__()
        self.session, self.layer = session, layer
        self.is_initialized = True

    def lazy_initialization(self, *args: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tree, slim = self.session.tree, self.layer.slim
        states = key_states, value_states
        stored: tuple[Tensor, ...] = states
        if slim is not None:
            stored = (self.session.slim.take(states),)
            if slim.rotates:
                self.session.slim.rotate(tree)
        if not tree.steps:
            is_first = not self.layer.prompt_length
            self.layer.prefill(*stored)
            # The prompt may be read in chunks, and later chunks see earlier ones.
            return states if is_first else self.layer.prompt()
        self.session.appended(self.layer)
        spanned = self.layer.append(*stored)
        keys, values = spanned if slim is None else (_of_width(each, tree) for each in states)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        tree = self.session.tree
        if tree.steps:
            # A captured step must not bake in a number; outside a step a number is better: reading a tensor may wait.
            return tree.position if self.session.is_active else tree.length  # type: ignore[return-value]
        return self.layer.prompt_length

    def get_mask_sizes(self, query_length: int | Tensor, *args: Any) -> tuple[int, int]:
        if self.session.tree.steps:
            return self.session.tree.width, 0
        return self.get_seq_length() + _count(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        pass  # the tree is reordered as a whole


def _of_width(states: Tensor, tree: BeamTree) -> Tensor:
    """`[B*M, H, 1, D]` -> zeros `[B, H, width, D]`, for all slots that a step spans, that take no memory."""
    return states.new_zeros(1).expand(tree.batch, states.shape[1], tree.width, states.shape[3])


def _count(query_length: int | Tensor) -> int:
    """The number of queries, which 5.x passes as a number, and 4.57 as a tensor of positions."""
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


class _HybridLayer(recurrent.StateLayer, _Layer):
    """A layer of the tree that holds recurrent states, too, one row per beam."""

    is_compileable = False

    def __init__(self, session: Session, layer: TreeLayer, number_of_states: int) -> None:
        _Layer.__init__(self, session, layer)
        recurrent.StateLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:  # of a state: keys and values need none
            recurrent.StateLayer.lazy_initialization(self, **kwargs)


class TreeCache(Cache):
    """The self-attention cache: layers are made when the model updates them, with the host's sliding windows."""

    def __init__(self, session: Session, stock: Cache) -> None:
        super().__init__(layers=[])
        self.session = session
        self.windows = [getattr(layer, "sliding_window", None) for layer in stock.layers]
        self.hosts: list[Any] = []  # the host's layers, if some hold recurrent states
        if not all(type(layer) in KEYS_ALONE for layer in stock.layers):
            self.hosts = list(stock.layers)
            self.layers += [self._made(*each) for each in zip(self.hosts, self.windows, strict=True)]
        self.recurrent = [layer for layer in self.layers if hasattr(layer, "recurrent_states")]

    def _made(self, host: Any, window: int | None) -> Any:
        layer = TreeLayer(self.session.tree, window)  # one that holds nothing, if the host's has no keys
        self.session.tree.layers.append(layer)
        if recurrent.has_no_keys(host):
            return host
        if recurrent.is_hybrid(host):
            return _HybridLayer(self.session, layer, host.number_of_states)
        return _Layer(self.session, layer)

    def begin_decoding(self) -> None:
        """Give each beam the recurrent states of the prompt."""
        if self.recurrent:
            tree = self.session.tree
            sentences = torch.arange(tree.batch, device=tree.positions().device)
            recurrent.select(self.recurrent, sentences.repeat_interleave(tree.beams))

    def select(self, sentences: Tensor) -> None:
        """Drop the recurrent states of all sentences but these, int64 `[B']`."""
        recurrent.select(self.recurrent, recurrent.rows_of(sentences, self.session.tree.beams))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layers = self.session.tree.layers
        while len(layers) <= layer_idx:
            window = self.windows[len(layers)] if len(layers) < len(self.windows) else None
            noted = self.session.slim.noted
            layers.append(TreeLayer(self.session.tree, window, noted and noted.slim))
        self.cover()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def cover(self) -> None:
        """Make a layer for each layer of the tree."""
        for layer in self.session.tree.layers[len(self.layers) :]:
            self.layers.append(_Layer(self.session, layer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self._counting(layer_idx)
        return 0 if layer is None else layer.get_seq_length()

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        layer = self._counting(layer_idx)
        return (_count(query_length), 0) if layer is None else layer.get_mask_sizes(query_length)

    def _counting(self, layer_idx: int) -> _Layer | None:
        """The layer, if it counts tokens, else the first that does, as in the host's cache; None if there is none."""
        if layer_idx >= len(self.layers):
            return None
        counting = (layer for layer in self.layers[layer_idx:] if isinstance(layer, _Layer))
        return next(counting, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.session.tree.steps:  # in the first step all beams share the prompt
            device = self.session.tree.positions().device
            rows = beam_idx.to(device, torch.int64)
            self.session.tree.reorder(rows)
            recurrent.reorder(self.recurrent, rows)


class SourceLayer:
    """One layer of the cross-attention cache; with a slim cache, `keys` and `values` are zeros that take no memory."""

    def __init__(self, keys: Tensor, values: Tensor, *stored: Tensor) -> None:
        """`stored`: what is stored in place of `keys` and `values`."""
        self.tensors = [x.contiguous() for x in stored or (keys, values)]
        self._sizes = [(x.shape[1], x.shape[3]) for x in (keys, values)]
        self.slim: Slim | None = None
        self.module: Any = None  # the attention module, if it has a slim cache

    @property
    def keys(self) -> Tensor:
        return self._shown(0)

    @property
    def values(self) -> Tensor:
        return self._shown(1)

    def _shown(self, which: int) -> Tensor:
        if self.slim is None:
            return self.tensors[which]
        (heads, size), (latent,) = self._sizes[which], self.spanned()
        return latent.new_zeros(1).expand(latent.shape[0], heads, latent.shape[2], size)

    def spanned(self) -> tuple[Tensor, ...]:
        """The tensors that attention reads, each `[B, H, N, D]`."""
        return tuple(self.tensors)


class EncodedLayer(SourceLayer):
    """A layer that attends to the encoder output, which is stored elsewhere, once for all layers."""

    def __init__(self, keys: Tensor, values: Tensor, caches: SlimCaches) -> None:
        super().__init__(keys, values, keys[:0])
        self.caches, self.tensors = caches, []

    def spanned(self) -> tuple[Tensor, ...]:
        return (self.caches.seen_source()[:, None],)


class FollowingLayer(SourceLayer):
    """A layer that attends to what the first layer has stored."""

    def __init__(self, keys: Tensor, values: Tensor, first: SourceLayer) -> None:
        super().__init__(keys, values, keys[:0])
        self.first, self.tensors = first, []

    def spanned(self) -> tuple[Tensor, ...]:
        return self.first.spanned()


class SkippedLayer:
    """Fills the place of a layer that the model does not have."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.slim = self.module = None


class SourceCache(Cache):
    """The cross-attention cache."""

    layers: list[Any]

    def __init__(self, caches: SlimCaches) -> None:
        super().__init__(layers=[])
        self._caches = caches

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        caches, noted = self._caches, self._caches.noted
        # A model may have layers between the encoder output and the decoder.
        if noted is not None and noted.slim.kind == "x" and noted.rows is not caches.source:
            noted = caches.noted = None
        if noted is None:
            layer = SourceLayer(key_states, value_states)
        elif noted.slim.kind == "x":
            layer = EncodedLayer(key_states, value_states, caches)
        elif noted.slim.kind == "h":
            layer = FollowingLayer(key_states, value_states, self._first())
        else:
            layer = SourceLayer(key_states, value_states, noted.rows[:, None])
        if noted is not None:
            caches.noted, layer.slim, layer.module = None, noted.slim, noted.module
            caches.attend_by(layer)
        self.layers += [SkippedLayer() for _ in range(len(self.layers), layer_idx + 1)]
        self.layers[layer_idx] = layer
        return key_states, value_states

    def _first(self) -> SourceLayer:
        """The layer whose keys the following layers attend to."""
        return next(layer for layer in self.layers if layer.slim is not None and layer.slim.kind == "k")

    def taken_over(self, layer: Any) -> Any:
        """A copy, without tensors, of a layer of another such cache, for this cache's encoder output."""
        layer = copy.copy(layer)
        layer.tensors = []
        if isinstance(layer, EncodedLayer):
            layer.caches = self._caches
        if isinstance(layer, FollowingLayer):
            layer.first = self._first()
        if layer.slim is not None:
            self._caches.attend_by(layer)
        return layer


class TreeEncoderDecoderCache(EncoderDecoderCache):
    """The two caches of a decoder; cross-attention has one row per sentence, whatever the number of beams."""

    cross_attention_cache: SourceCache
    _seats: list[list[RowPool]]  # for the tensors of each layer, in batches that stay full
    _capacity = 0
    _is_own = False  # the tensors of cross-attention are copies: sentences have left

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)

    def select(self, sentences: Tensor) -> None:
        # Not in what the model has made: code of the user's may have kept it. The copies change as self-attention's do.
        moves = moves_to(sentences) if self._is_own else None
        for layer in self.cross_attention_cache.layers:
            layer.tensors = [
                tensor.index_select(0, sentences) if moves is None else in_place(tensor, len(sentences), moves)
                for tensor in layer.tensors
            ]
        self._is_own = True

    def regroup(self, stay: Tensor, newcomers: list[Any], length: int, rows: int) -> None:
        """Drop all sentences but `stay` (int64 `[S]`), append those of `newcomers`, all with `length` slots."""
        others = [cache.cross_attention_cache.layers for cache in newcomers]
        mine = self.cross_attention_cache
        if not mine.layers:
            for layer in others[0]:
                mine.layers.append(mine.taken_over(layer))
            self.is_updated = dict.fromkeys(range(len(mine.layers)), True)
            buffers = self.self_attention_cache.session.tree.buffers
            self._seats = [[RowPool(rows, buffers) for _ in layer.tensors] for layer in others[0]]
        self._capacity = max(self._capacity, length)
        for index, layer in enumerate(mine.layers):
            for place, seats in enumerate(self._seats[index]):
                taken = layer.tensors[place] if place < len(layer.tensors) else None
                new = [layers[index].tensors[place] for layers in others]
                held = seats.regroup(taken, stay, None, new, length, self._capacity)
                layer.tensors[place : place + 1] = [held[:, :, :length]]

    def close(self) -> None:
        """Free the tensors of the cross-attention cache."""
        self.cross_attention_cache.layers = []
        self._seats = []

    def stored(self) -> list[Tensor]:
        """The tensors of the cross-attention cache."""
        return [tensor for layer in self.cross_attention_cache.layers for tensor in layer.tensors]

    @property
    def cross_bytes(self) -> int:
        encoded = next((x for x in self.cross_attention_cache.layers if isinstance(x, EncodedLayer)), None)
        return sum(tensor.nbytes for tensor in (*self.stored(), *(encoded.spanned() if encoded else ())))


def tree_cache(session: Session, stock: Cache) -> Cache:
    """A cache over an empty tree, in place of the empty cache that the host has prepared."""
    if isinstance(stock, EncoderDecoderCache):
        return TreeEncoderDecoderCache(TreeCache(session, stock.self_attention_cache), SourceCache(session.slim))
    return TreeCache(session, stock)


def resized(tensor: Tensor, dim: int, length: int) -> Tensor:
    """`tensor` cut off, or filled up with zeros, to `length` along `dim`."""
    if tensor.shape[dim] >= length:
        return tensor.narrow(dim, 0, length)
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, length - tensor.shape[dim]))
