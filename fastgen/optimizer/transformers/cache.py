"""The tree as a transformers `Cache`, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from fastgen.cache.joint import Seats
from fastgen.cache.slim import Slim, keys_and_values
from fastgen.cache.tree import BeamTree, TreeLayer
from fastgen.optimizer.transformers.session import Session, traced
from fastgen.optimizer.transformers.slim import Noted, SlimCaches


def unsupported_cache(cache: Any) -> str | None:
    """Why the tree cannot stand in for the cache the host has prepared, or None."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "its cache is offloaded"
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a layer keeps its state in a {type(layer).__name__}"
    return None


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
        tree, is_slim = self.session.tree, self.layer.slim is not None
        states = key_states, value_states
        stored: tuple[Tensor, ...] = (_stored(self.session.slim.take()),) if is_slim else states
        if not tree.steps:
            is_first = not self.layer.prompt_length
            self.layer.prefill(*stored)
            # The prompt may be read in chunks, and later ones see those before.
            return states if is_first else self.layer.prompt()
        self.session.appended(self.layer)
        stored = self.layer.append(*stored)
        keys, values = (_of_width(each, tree) for each in states) if is_slim else stored
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        tree = self.session.tree
        if tree.steps:
            # A step must not bake it in; elsewhere a number is at hand, and a tensor might have to be waited for.
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


def _stored(noted: Noted) -> Tensor:
    """As the tree stores it, `[rows, 1, P, C]`."""
    return noted.slim.stored(noted.rows)


def _of_width(states: Tensor, tree: BeamTree) -> Tensor:
    """`[B*M, H, 1, D]` -> zeros of the shape of all that a step spans, `[B, H, width, D]`, that take no memory."""
    return states.new_zeros(1).expand(tree.batch, states.shape[1], tree.width, states.shape[3])


def _count(query_length: int | Tensor) -> int:
    """5.x says how many queries there are; 4.57 gives their positions."""
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


class TreeCache(Cache):
    """Self-attention's cache: layers appear as the model updates them, windowed as the host's own were."""

    def __init__(self, session: Session, stock: Cache) -> None:
        super().__init__(layers=[])
        self.session = session
        self.windows = [getattr(layer, "sliding_window", None) for layer in stock.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if (compiled := traced()) is not None:
            return compiled.append(self.session, key_states, value_states, layer_idx)
        layers = self.session.tree.layers
        while len(layers) <= layer_idx:
            window = self.windows[len(layers)] if len(layers) < len(self.windows) else None
            noted = self.session.slim.noted
            layers.append(TreeLayer(self.session.tree, window, noted and noted.slim))
        self.cover()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def cover(self) -> None:
        """Have a layer for each of the tree's."""
        for layer in self.session.tree.layers[len(self.layers) :]:
            self.layers.append(_Layer(self.session, layer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if layer_idx >= len(self.layers) else self.layers[layer_idx].get_seq_length()

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        if layer_idx >= len(self.layers):
            return _count(query_length), 0
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.session.tree.steps:  # in the first step all beams share the prompt
            device = self.session.tree.ancestry().device
            self.session.tree.reorder(beam_idx.to(device, torch.int64))


class SourceLayer:
    """Keys and values of the source that nobody computes: they have a shape, and take no memory."""

    def __init__(self, caches: SlimCaches, noted: Noted, keys: Tensor, values: Tensor) -> None:
        self.caches, self.module, self.slim = caches, noted.module, noted.slim
        self._sizes = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])

    @property
    def keys(self) -> Tensor:
        return self._of_size(*self._sizes[0])

    @property
    def values(self) -> Tensor:
        return self._of_size(*self._sizes[1])

    def _of_size(self, heads: int, size: int) -> Tensor:
        source = self.caches.seen_source()
        return source.new_zeros(1).expand(source.shape[0], heads, source.shape[1], size)


class SourceCache(DynamicCache):
    """Cross-attention's cache: keys and values, or nothing where attention reads the source itself."""

    def __init__(self, caches: SlimCaches) -> None:
        super().__init__()
        self._caches = caches

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        noted, self._caches.noted = self._caches.noted, None
        # A model may put something between the encoder's output and its decoder.
        if noted is None or noted.rows is not self._caches.source:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return keys, values
        assert layer_idx == len(self.layers)
        self._caches.attend_to_source(noted.module, noted.slim)
        self.layers.append(SourceLayer(self._caches, noted, key_states, value_states))
        return key_states, value_states

    def taken_over(self, layer: Any) -> Any:
        """A layer of another such cache, for this one's source."""
        layer = copy.copy(layer)
        if isinstance(layer, SourceLayer):
            layer.caches = self._caches
            self._caches.attend_to_source(layer.module, layer.slim)
        return layer

    def kinds(self) -> set[str]:
        """What is stored: keys and values ("kv"), or the encoder's output alone ("e")."""
        return {"e" if isinstance(layer, SourceLayer) else "kv" for layer in self.layers}

    def stored_layers(self) -> list[Any]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if not isinstance(layer, SourceLayer)]


class TreeEncoderDecoderCache(EncoderDecoderCache):
    """Both caches of a decoder; the source's keys are the sentence's, whatever the beams."""

    cross_attention_cache: SourceCache
    _seats: list[tuple[Seats, Seats]]  # keys' and values' of each layer, once sentences come and go
    _capacity = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)

    def keep(self, sentences: Tensor) -> None:
        for layer in self.cross_attention_cache.stored_layers():
            layer.batch_select_indices(sentences)

    def regroup(self, stay: Tensor, newcomers: list[Any], length: int, rows: int) -> None:
        """Drop all sentences but `stay` (int64 `[S]`), put those of other caches behind, all with `length` slots."""
        others = [cache.cross_attention_cache for cache in newcomers]
        mine = self.cross_attention_cache
        is_new = not mine.layers
        if is_new:
            mine.layers = [mine.taken_over(layer) for layer in others[0].layers]
            self.is_updated = dict.fromkeys(range(len(mine.layers)), True)
            buffers = self.self_attention_cache.session.tree.buffers
            self._seats = [(Seats(rows, buffers), Seats(rows, buffers)) for _ in mine.stored_layers()]
        self._capacity = max(self._capacity, length)
        for index, layer in enumerate(mine.stored_layers()):
            for name, seats in zip(("keys", "values"), self._seats[index], strict=True):
                taken = None if is_new else getattr(layer, name)
                new = [getattr(cache.stored_layers()[index], name) for cache in others]
                held = seats.regroup(taken, stay, None, new, length, self._capacity)
                setattr(layer, name, held[:, :, :length])

    def close(self) -> None:
        """Let go of the source's keys."""
        self.cross_attention_cache.layers = []
        self._seats = []

    def stored(self) -> list[Tensor]:
        """The source's keys and values, as far as there are any."""
        return [x for layer in self.cross_attention_cache.stored_layers() for x in (layer.keys, layer.values)]

    @property
    def cross_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.stored())


def tree_cache(session: Session, stock: Cache) -> Cache:
    """An empty tree in place of the empty cache that the host has prepared."""
    if isinstance(stock, EncoderDecoderCache):
        return TreeEncoderDecoderCache(TreeCache(session, stock.self_attention_cache), SourceCache(session.slim))
    return TreeCache(session, stock)


def resized(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Cut off, or fill up with zeros, to this length along `dim`."""
    if tensor.shape[dim] >= length:
        return tensor.narrow(dim, 0, length)
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, length - tensor.shape[dim]))


class _Rows(DynamicLayer):
    """A layer with one row per beam, gathered when somebody looks."""

    def __init__(self, stored: tuple[Tensor, ...], slim: Slim | None, index: Tensor) -> None:
        """`stored`: keys and values or, of a slim cache, what they follow from, each `[B, H, slots, D]`; `index`: int64
        `[B*M, length]`."""
        super().__init__()
        self._stored, self._slim, self._index = stored, slim, index
        self.dtype, self.device = stored[0].dtype, stored[0].device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        # Nothing need be gathered for it, unless somebody has looked and may have appended since.
        length: int = self._index.shape[1] if vars(self).get("keys") is None else super().get_seq_length()
        return length

    def __getattribute__(self, name: str) -> Any:
        if name in ("keys", "values") and vars(self).get(name) is None and (stored := vars(self).get("_stored")):
            self.keys, self.values = keys_and_values(tuple(_gather(x, self._index) for x in stored), self._slim)
        return super().__getattribute__(name)


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """`source` `[B, H, slots, D]`, `index` int64 `[B*M, length]` -> `[B*M, H, length, D]`."""
    sentences = torch.arange(index.shape[0], device=index.device) // (index.shape[0] // source.shape[0])
    return source[sentences[:, None], :, index].transpose(1, 2)


def stock_cache(cache: Cache, tree: BeamTree) -> Cache:
    """What the host would have returned as `past_key_values`: one row per beam, gathered on demand."""
    paths = tree.paths()
    own = DynamicCache()
    own.layers = [_Rows(layer.stored(), layer.slim, paths) for layer in tree.layers]
    if not isinstance(cache, EncoderDecoderCache):
        return own
    cross = DynamicCache()
    for layer in cache.cross_attention_cache.layers:
        everything = torch.arange(layer.keys.shape[2], device=paths.device).expand(paths.shape[0], -1)
        if isinstance(layer, SourceLayer):
            stored: tuple[Tensor, ...] = (layer.slim.stored(layer.caches.seen_source()),)
            cross.layers.append(_Rows(stored, layer.slim, everything))
        else:
            cross.layers.append(_Rows((layer.keys, layer.values), None, everything))
    return EncoderDecoderCache(own, cross)
