"""Wraps attributes of a host for a while: from when the first thread needs that until no thread does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastgen.patching.patch_set import PatchSet

Wrapper = Callable[[Any], Any]

_lock = threading.Lock()
_redirections: dict[tuple[Any, str], list[Any]] = {}  # (owner, name) -> [users, patches]


@contextlib.contextmanager
def redirected(wrappers: Mapping[Any, Wrapper]) -> Iterator[None]:
    """Inside the block these attributes, by owner and name, are wrapped for all threads: wrappers ask whose call it is.

    The owners are classes or modules.
    """
    with _lock:
        for (owner, name), wrap in wrappers.items():
            entry = _redirections.setdefault((owner, name), [0, PatchSet()])
            if not entry[0]:
                entry[1].replace(owner, name, wrap(getattr(owner, name)))
            entry[0] += 1
    try:
        yield
    finally:
        with _lock:
            for seam in wrappers:
                entry = _redirections[seam]
                entry[0] -= 1
                if not entry[0]:
                    entry[1].revert()
                    del _redirections[seam]
