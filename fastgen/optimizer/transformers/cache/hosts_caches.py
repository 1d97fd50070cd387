"""Which of the host's caches the tree can stand in for."""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any

from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from fastgen.optimizer.transformers.cache import recurrent
from fastgen.patching.replaced_code import is_of
from fastgen.report import OfThisVersion

KEYS_ALONE = (DynamicLayer, DynamicSlidingWindowLayer)


def unsupported_storage(cache: Any) -> str | None:
    """Why a cache that the host has prepared may be neither replaced nor reordered, or None."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not hasattr(cache, "reorder_cache") or not type(cache).__module__.startswith("transformers."):
        return _told(type(cache), f"its cache is a {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        return "its cache is offloaded"
    return None


def unsupported_cache(cache: Any) -> str | None:
    """Why the tree cannot stand in for the cache the host has prepared, or None."""
    is_split = isinstance(cache, EncoderDecoderCache)
    if is_split:
        cache = cache.self_attention_cache
    if type(cache) is not DynamicCache:
        return _told(type(cache), f"its cache is a {type(cache).__name__}")
    for layer in cache.layers:
        if type(layer) not in KEYS_ALONE and (is_split or not recurrent.is_known(layer)):
            return _told(type(layer), f"a layer keeps its state in a {type(layer).__name__}")
    if cache.layers and all(map(recurrent.has_no_keys, cache.layers)):
        return f"all layers keep their state in a {type(cache.layers[0]).__name__}"
    return None


def replaced_method() -> str | None:
    """The first method of the host's caches that somebody has replaced, in words; None if none: the tree calls none."""
    for kind in (Cache, DynamicCache, EncoderDecoderCache, CacheLayerMixin, *KEYS_ALONE):
        for name, value in vars(kind).items():
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, FunctionType) and not is_of(function, "transformers", "torch", "fastgen"):
                return f"{kind.__name__}.{name} is not the host's own"
    return None


# Classes in the host's module of caches, in all versions so far, that are known, though the tree cannot replace them.
_KNOWN = re.compile(
    "(Static|Quantized|Offloaded|Hybrid|Sink|SlidingWindow|Mtp|DFlash|EncoderDecoder|Chunked|Dynamic"
    "|Quanto|HQQ|Fp8|Linear|Dummy|BaseQuantized)"
)


def _told(kind: type, reason: str) -> str:
    """The reason, marked as due to the host's version if this kind of cache is new in it."""
    is_new = kind.__module__ == Cache.__module__ and not _KNOWN.match(kind.__name__)
    return OfThisVersion(reason) if is_new else reason
