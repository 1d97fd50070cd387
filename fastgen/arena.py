"""Memory that a model's steps use again and again, on the CPU: fresh memory costs a page fault every 4 KiB.

What torch frees beyond some MB the C library returns to the system, at times: it depends on what else lies in its heap.
A step with large results then waits for its memory longer than for its products. So while a model runs in an arena,
our allocator (csrc/cpu/arena.cpp) keeps what this thread frees for what it asks for next.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import nn

from fastgen import buffers, memory

_lock = threading.Lock()
_kept: weakref.WeakKeyDictionary[nn.Module, Arena] = weakref.WeakKeyDictionary()


class Arena(contextlib.AbstractContextManager[None]):
    """Inside the block, this thread's tensors of 128 KiB and more lie in memory that the arena keeps.

    Entered any number of times, by any threads. A tensor may outlive it.
    """

    def __init__(self) -> None:
        self._native = torch.classes.fastgen.Arena()

    def __enter__(self) -> None:
        self._native.enter()

    def __exit__(self, *_: Any) -> None:
        self._native.leave()

    def nbytes(self) -> int:
        """Of the memory that is kept and in no use."""
        size: int = self._native.nbytes()
        return size

    def trim(self) -> None:
        """Free what is in no use."""
        self._native.trim()


def of(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model's arena; nothing where the operators are not native."""
    from fastgen import ops  # loads or even compiles them, so not before they are needed

    if not ops.is_native(torch.device("cpu")):
        return contextlib.nullcontext()
    with _lock:
        return _kept.get(model) or _kept.setdefault(model, Arena())


def nbytes() -> int:
    """The memory that arenas keep now and that is in no use."""
    with _lock:
        return sum(arena.nbytes() for arena in _kept.values())


def settle(model: nn.Module) -> None:
    """Between two calls: keep what is free for the next one, unless memory is short."""
    with _lock:
        arena = _kept.get(model)
    if arena is not None and not memory.may_keep(0, taken=nbytes() + buffers.nbytes()):
        arena.trim()


def release() -> None:
    """Keep nothing any longer."""
    with _lock:
        _kept.clear()
