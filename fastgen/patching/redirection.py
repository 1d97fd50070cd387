"""Wraps attributes of a host for a while: from when the first thread needs that until no thread does."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastgen import locks
from fastgen.patching.patch_set import PatchSet

Wrapper = Callable[[Any], Any]


class _User:
    """A block that needs the wrappers; it lives as long as the frame of the block, however that ends."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


_lock = locks.reentrant_lock()
# (owner, name) -> users, patches
_redirections: dict[tuple[Any, str], tuple[weakref.WeakSet[_User], PatchSet]] = {}


@contextlib.contextmanager
def redirected(wrappers: Mapping[Any, Wrapper]) -> Iterator[None]:
    """Inside the block these attributes, by owner and name, are wrapped for all threads: wrappers ask whose call it is.

    The owners are classes or modules. Whatever ends the block, or keeps it from beginning, they are put back.
    """
    user = _User()
    try:
        with _lock:
            put_back()
            for (owner, name), wrap in wrappers.items():
                users, patches = _redirections.setdefault((owner, name), (weakref.WeakSet(), PatchSet()))
                if not len(patches):
                    patches.replace(owner, name, wrap(getattr(owner, name)))
                users.add(user)
        yield
    finally:
        with _lock:
            for seam in wrappers:
                if seam in _redirections:
                    _redirections[seam][0].discard(user)
            put_back()


def put_back() -> None:
    """Put back what no block needs any more; that some is left is the doing of an interrupt."""
    with _lock:
        for seam, (users, patches) in list(_redirections.items()):
            if not users:
                patches.revert()
                del _redirections[seam]


def _begin_anew() -> None:
    """In a forked process: the blocks of other threads will not end, as there are no such threads."""
    for users, _ in _redirections.values():
        for user in list(users):
            if user.thread != threading.get_ident():
                users.discard(user)
    put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
