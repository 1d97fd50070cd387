"""The one prefix cache of the process, and what of it belongs to which model with which weights."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from fastgen import config, locks, report
from fastgen.cache.prefix_cache import PrefixCache, Tensors
from fastgen.memory import limits
from fastgen.memory.release import keeper

_STATES = 4  # of one model: adapters may take turns

prefixes = PrefixCache()
_lock = locks.reentrant_lock()
_numbers = itertools.count()
# By model: the keys under which something is stored, by the model's state; least recently used first.
_keys: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, int]] = weakref.WeakKeyDictionary()
_counts: Counter[str] = Counter()
_unused: dict[str, str] = {}
_live: set[Hashable] = set()  # all keys in `_keys`


def is_on() -> bool:
    """Whether something may be kept now; applies the limit that is configured.

    The limit is the largest of the process's and of those of open blocks, so that no thread evicts what another keeps.
    """
    limit = max(config.everywhere("prefix_cache"))
    if limit != prefixes.limit:
        prefixes.limit = limit
    return config.current().prefix_cache > 0


def key_of(model: Any, state: Hashable) -> Hashable:
    """The key under which to store what a model computes in a state: its weights, and all else that results depend on.

    The model is not kept alive, and what is stored under the key dies with the model.
    """
    with _lock:
        keys = _keys.get(model)
        if keys is None:
            keys = _keys[model] = OrderedDict()
            weakref.finalize(model, _drop_all, keys).atexit = False
        if state not in keys:
            keys[state] = next(_numbers)
            _live.add(keys[state])
        keys.move_to_end(state)
        while len(keys) > _STATES:
            _drop(keys.popitem(last=False)[1])
        return keys[state]


def keep(key: Hashable, tokens: Sequence[Hashable], tensors: Tensors) -> None:
    """Store a sequence under a key, as `PrefixCache.insert` does, unless the key has been dropped meanwhile.

    If memory runs out, everything is forgotten instead: a call needs the memory more.
    """
    try:
        prefixes.insert(key, tokens, tensors)
    except (RuntimeError, MemoryError) as error:
        if not limits.is_out_of_memory(error):
            raise
        prefixes.clear()
    if key not in _live:  # asked afterwards: who drops a key makes it dead first
        prefixes.drop(key)


def _drop(*keys: Hashable) -> None:
    for key in keys:
        _live.discard(key)
        prefixes.drop(key)


def _drop_all(keys: OrderedDict[Hashable, int]) -> None:
    _drop(*keys.values())


def note(saved: int) -> None:
    """Count a call: how many tokens it did not have to read."""
    with _lock:
        _counts.update(calls=1, hits=int(saved > 0), tokens=saved)


def note_unused(model: str, reason: str) -> None:
    """Remember why a call of a model of this class could not use the cache."""
    with _lock:
        _unused[model] = reason


@report.provides("prefixes")
def counts() -> dict[str, int]:
    """The `calls` that looked for kept prefixes, the `hits`, the `tokens` they need not read, and the `bytes` kept."""
    with _lock:
        if not _counts and not prefixes.nbytes:
            return {}
        return {"calls": 0, "hits": 0, "tokens": 0, **_counts, "bytes": prefixes.nbytes}


@report.provides("prefixes_unused")
def unused() -> dict[str, str]:
    """Why the last call that could not use the cache could not, by class of the model."""
    with _lock:
        return dict(_unused)


def reset() -> None:
    """Forget the counts."""
    with _lock:
        _counts.clear()
        _unused.clear()


@keeper
def release() -> None:
    """Forget everything that is kept."""
    with _lock:
        _live.clear()
        prefixes.clear()
        _keys.clear()
