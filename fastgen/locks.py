"""Locks that work in forked processes, in which a thread that held one in the parent does not exist."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any


class ForkSafeLock:
    """A lock; in a forked process one that another thread held is free."""

    def __init__(self, reentrant: bool = True) -> None:
        """`reentrant`: its thread may take it again, as the garbage collector may have it do anywhere."""
        self._make: Any = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _all.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        """As `threading.Lock.acquire`."""
        return bool(self._lock.acquire(blocking))

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> ForkSafeLock:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Free the lock if another thread holds it, which does not exist in this process."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = self._make()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _begin_anew() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin_anew)
