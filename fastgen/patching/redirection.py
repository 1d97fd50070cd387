"""Wraps attributes of a host for a while: from when the first thread needs that until no thread does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastgen.patching.patch_set import PatchSet

Wrapper = Callable[[Any], Any]

_lock = threading.Lock()
_redirections: dict[tuple[Any, str], tuple[set[object], PatchSet]] = {}  # (owner, name) -> users, patches


@contextlib.contextmanager
def redirected(wrappers: Mapping[Any, Wrapper]) -> Iterator[None]:
    """Inside the block these attributes, by owner and name, are wrapped for all threads: wrappers ask whose call it is.

    The owners are classes or modules. Whatever ends the block, or keeps it from beginning, they are put back.
    """
    user = object()
    try:
        with _lock:
            for (owner, name), wrap in wrappers.items():
                users, patches = _redirections.setdefault((owner, name), (set(), PatchSet()))
                if not len(patches):
                    patches.replace(owner, name, wrap(getattr(owner, name)))
                users.add(user)
        yield
    finally:
        with _lock:
            for seam in wrappers:
                if seam in _redirections:
                    users, patches = _redirections[seam]
                    users.discard(user)
                    if not users:
                        patches.revert()
                        del _redirections[seam]
