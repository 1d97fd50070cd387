"""A cache of the host made from the tree, as the host would have returned it: gathered when somebody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from fastgen import phases
from fastgen.cache.slim.latent import Slim, keys_and_values
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.transformers.cache import recurrent
from fastgen.optimizer.transformers.cache.tree_cache import SkippedLayer, TreeCache

__phase__ = phases.CACHE


class _Gathered(CacheLayerMixin):
    """A layer with one row per beam, gathered when `keys` or `values` are first read."""

    hosts: type  # the host's layer that it stands for
    is_contiguous = True  # as what the host has joined is

    def fill(self, stored: tuple[Tensor, ...], slim: Slim | None, index: Tensor) -> None:
        """`stored`: keys and values or what a slim cache stores instead, each `[B, H, slots, D]`; `index`: the slots of
        each row, int64 `[B*M, length]`."""
        self._stored, self._slim, self._index = stored, slim, index
        self.dtype, self.device = stored[0].dtype, stored[0].device
        self.is_initialized = True
        if slim is not None:
            _ = self.keys  # computed from weights, which may change before somebody looks

    def __getattribute__(self, name: str) -> Any:
        if name in ("keys", "values") and vars(self).get(name) is None and (stored := vars(self).get("_stored")):
            found = keys_and_values(tuple(_gather(x, self._index) for x in stored), self._slim)
            self.keys, self.values = (x.contiguous() for x in found) if self.is_contiguous else found
            self._stored = ()  # the tree goes
        return super().__getattribute__(name)

    def reset(self) -> None:
        _ = self.keys  # gathered: some versions of the host make zeros of them, others drop them
        super().reset()


class _Rows(_Gathered, DynamicLayer):
    """A gathered layer of all positions."""

    hosts = DynamicLayer

    def __init__(self, stored: tuple[Tensor, ...], slim: Slim | None, index: Tensor) -> None:
        super().__init__()
        self.fill(stored, slim, index)

    def get_seq_length(self) -> int:
        length: int = self._index.shape[1] if self._stored else super().get_seq_length()  # it need not be gathered
        return length


class _WindowRows(_Gathered, DynamicSlidingWindowLayer):
    """A gathered layer of a sliding window: as many positions as the host's layer stores between two steps."""

    hosts = DynamicSlidingWindowLayer
    is_contiguous = False  # the host's are a part of what it has joined

    def __init__(self, stored: tuple[Tensor, ...], slim: Slim | None, index: Tensor, window: int) -> None:
        super().__init__(sliding_window=window)
        self.fill(stored, slim, index[:, -window + 1 :])
        self.cumulative_length = index.shape[1]
        if (size := vars(self).get("_sliding_window_tensor")) is not None:  # not in all versions
            self._sliding_window_tensor = size.to(self.device)


def hosts_type(layer: Any) -> type:
    """The class of the host's layer that `layer` is or stands for."""
    return layer.hosts if isinstance(layer, _Gathered) else type(layer)


def _rows(layer: TreeLayer, paths: Tensor) -> DynamicLayer:
    if not layer.stored():
        return DynamicLayer()
    if layer.window is None:
        return _Rows(layer.needed(), layer.slim, paths)
    return _WindowRows(layer.needed(), layer.slim, paths, layer.window)


def _hosts(host: Any, layer: Any, gathered: Any) -> Any:
    """A layer as the host's cache would hold it, where some layers hold recurrent states."""
    if recurrent.has_no_keys(host):
        return layer
    return recurrent.with_keys(host, layer, gathered) if recurrent.is_hybrid(host) else gathered


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """Gather slots: `source` `[B, H, slots, D]`, `index` int64 `[B*M, length]` -> `[B*M, H, length, D]`."""
    sentences = torch.arange(index.shape[0], device=index.device) // (index.shape[0] // source.shape[0])
    return source[sentences[:, None], :, index].transpose(1, 2)


def stock_cache(cache: Cache, tree: BeamTree) -> Cache:
    """The cache that the host would have returned: one row per beam, gathered on demand."""
    paths = tree.paths()
    own = DynamicCache()
    own.layers = [_rows(layer, paths) for layer in tree.layers]
    if isinstance(cache, TreeCache) and cache.hosts:
        own.layers = [_hosts(*each) for each in zip(cache.hosts, cache.layers, own.layers, strict=True)]
    if not isinstance(cache, EncoderDecoderCache):
        return own
    cross = DynamicCache()
    for layer in cache.cross_attention_cache.layers:
        if isinstance(layer, SkippedLayer):
            cross.layers.append(DynamicLayer())
            continue
        everything = torch.arange(layer.keys.shape[2], device=paths.device).expand(paths.shape[0], -1)
        cross.layers.append(_Rows(layer.spanned(), layer.slim, everything))
    return EncoderDecoderCache(own, cross)
