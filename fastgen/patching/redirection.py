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
    """A block that needs the wrappers. It lives no longer than the frame of the block, however that ends."""

    def __init__(self) -> None:
        self.thread, self.has_ended = threading.get_ident(), False


_Seam = tuple[Any, str]  # owner, name

_lock = locks.reentrant_lock()
_redirections: dict[_Seam, tuple[weakref.WeakSet[_User], PatchSet]] = {}


@contextlib.contextmanager
def redirected(wrappers: Mapping[Any, Wrapper]) -> Iterator[None]:
    """Inside the block these attributes, by owner and name, are wrapped for all threads: wrappers ask whose call it is.

    The owners are classes or modules. Whatever ends the block, or keeps it from beginning, they are put back.
    """
    user = _User()
    try:
        with _lock:
            for (owner, name), wrap in wrappers.items():
                _put_back_unused((owner, name))
                users, patches = _redirections.get((owner, name)) or (weakref.WeakSet(), PatchSet())
                users.add(user)  # first: the garbage collector may end another block of this thread at any moment
                _redirections[owner, name] = users, patches
                if not len(patches):
                    patches.replace(owner, name, wrap(getattr(owner, name)))
        yield
    finally:
        user.has_ended = True  # first: if an interrupt ends this, too, a later block or `put_back` does the rest
        put_back()


def put_back() -> None:
    """Put back what no block needs any more: only an interrupt leaves any."""
    with _lock:
        for seam in list(_redirections):
            _put_back_unused(seam)


def _put_back_unused(seam: _Seam) -> None:
    if (found := _redirections.get(seam)) is not None and all(user.has_ended for user in found[0]):
        found[1].revert()
        _redirections.pop(seam, None)


def _begin_anew() -> None:
    """In a forked process: the blocks of other threads will not end, as there are no such threads."""
    for users, _ in _redirections.values():
        for user in list(users):
            user.has_ended = user.has_ended or user.thread != threading.get_ident()
    put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
