"""Locks that work in forked processes, in which a thread that held one in the parent does not exist."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_all: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """A lock that is free in a forked process if another thread held it."""
    return _noted(threading.Lock())


def reentrant_lock() -> threading.RLock:
    """The same, for what the garbage collector may have a thread that holds the lock do, anywhere."""
    return _noted(threading.RLock())


def _noted(made: Any) -> Any:
    _all.add(made)
    return made


def _begin_anew() -> None:
    for held in list(_all):
        if held.acquire(blocking=False):
            held.release()
        else:
            held._at_fork_reinit()  # as `logging` does with handlers' locks; a lock of Python's own stays in place


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin_anew)
