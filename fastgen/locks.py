"""Locks that work in forked processes, in which a thread that held one in the parent does not exist."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")

_all: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """A lock that is free in a forked process: no thread is to fork while it holds one."""
    return _noted(threading.Lock())


def reentrant_lock() -> threading.RLock:
    """A lock that is free in a forked process if another thread held it.

    Its thread may take it again, for what the garbage collector may have that thread do anywhere.
    """
    return _noted(threading.RLock())


def _noted(made: Any) -> Any:
    _all.add(made)
    return made


class cached_property(Generic[Value]):  # as Python's
    """`functools.cached_property`, without the lock of Pythons before 3.12: two threads may compute the value."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        value = vars(instance)[self._name] = self._function(instance)  # and Python asks no more
        return value


def _begin_anew() -> None:
    for held in list(_all):
        if held.acquire(blocking=False):
            held.release()
        else:  # in place, as `logging` does with its handlers' locks: all who refer to the lock see it free
            held._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin_anew)
