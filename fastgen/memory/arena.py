"""Keeps memory of a model's steps for later steps, on the CPU: fresh memory costs a page fault every 4 KiB.

The C library returns freed memory of more than some MB to the system, at times, depending on what else is in the heap.
A step with large results then waits longer for memory than for its products. So while a model runs in an arena, our
allocator (csrc/runtime/arena.cpp) keeps memory that this thread frees, and gives it to the thread's next requests.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from fastgen import locks, ops
from fastgen.memory import limits
from fastgen.memory.release import keeper

_lock = locks.reentrant_lock()  # reentrant: a model may die, or a search be abandoned, anywhere
_kept: weakref.WeakKeyDictionary[nn.Module, Arena] = weakref.WeakKeyDictionary()
_outside: Arena | None = None


class Arena(contextlib.AbstractContextManager[None]):
    """Inside the block, this thread's tensors of 128 KiB and more lie in memory that the arena keeps.

    It can be entered any number of times, by any threads. A tensor may outlive the arena.
    """

    def __init__(self, keeps: bool = True) -> None:
        """`keeps`: False for an arena inside which memory comes from torch's allocator again."""
        self._native = torch.classes.fastgen.Arena(keeps)

    def __enter__(self) -> None:
        self._native.enter()

    def __exit__(self, *_: Any) -> None:
        self._native.leave()

    def nbytes(self) -> int:
        """The bytes that are kept and not in use."""
        size: int = self._native.nbytes()
        return size

    def trim(self) -> None:
        """Free the memory that is not in use."""
        self._native.trim()


def of(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model's arena; a null context if arenas are not native, or the model is not on the CPU."""
    global _outside
    first = next(model.parameters(), None)
    if (first is not None and first.device.type != "cpu") or not ops.has_runtime():
        return contextlib.nullcontext()
    with _lock:
        arena = _kept.get(model)
        if arena is None:
            arena = _kept[model] = Arena()
            _outside = _outside or Arena(keeps=False)
        return arena


def outside() -> contextlib.AbstractContextManager[None]:
    """Inside the block, memory comes from torch: for tensors that stay, or that no step will need again."""
    return _outside or contextlib.nullcontext()


def nbytes() -> int:
    """Bytes that arenas keep now and that are not in use."""
    with _lock:
        return sum(arena.nbytes() for arena in _kept.values())


def settle() -> None:
    """After work that needed much memory: keep what is free now for the next steps, unless memory is short."""
    if not limits.may_keep(0, taken=nbytes()):
        with _lock:
            for arena in _kept.values():
                arena.trim()


@keeper
def release() -> None:
    """Drop all arenas."""
    with _lock:
        _kept.clear()
