"""Keeps large buffers between calls: on a CPU, fresh memory costs a page fault every 4 KiB.

Buffers of a model's calls are kept, and a later call takes one that fits and is not in use. Whether a buffer is in use
is told by torch's count of references to a storage: a view that a result, a hook or a traceback still holds keeps a
buffer from being taken, so no call needs to hand a buffer back, not even after an exception.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastgen import locks, report
from fastgen.memory import arena, limits
from fastgen.memory.release import keeper

_MIN_BYTES = 2**17  # smaller blocks are kept by the C library

_lock = locks.reentrant_lock()  # reentrant: a model may die, and its buffers with it, anywhere
_kept: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()  # uint8 [size], by size


def nbytes() -> int:
    """Bytes of the buffers kept now, those in use included."""
    with _lock:
        return sum(buffer.numel() for buffers in _kept.values() for buffer in buffers)


@report.provides("buffer_bytes")
def _nbytes_of_all() -> int:
    """Bytes kept in buffers and in arenas."""
    return nbytes() + arena.nbytes()


@keeper
def release() -> None:
    """Drop all buffers; one that is in use is freed when its call ends."""
    with _lock:
        _kept.clear()


class Buffers:
    """Gives large buffers to the calls of one model, in any thread."""

    def __init__(self, model: nn.Module | None) -> None:
        """`model`: the model for which buffers are kept; None keeps none."""
        self._model = None if model is None else weakref.ref(model)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor, which shares memory with no other tensor in use."""
        size = math.prod(shape) * dtype.itemsize
        model = None if self._model is None else self._model()
        # On other devices torch's own allocator keeps memory.
        if model is None or size < _MIN_BYTES or device.type != "cpu" or torch.compiler.is_dynamo_compiling():
            with arena.outside():
                return torch.empty(shape, dtype=dtype, device=device)
        with _lock, arena.outside():
            buffer = _take(model, size)
            if buffer is None:
                return torch.empty(shape, dtype=dtype, device=device)
            return buffer[:size].view(dtype).view(shape)  # in use from now on, so still under the lock


def _take(model: nn.Module, size: int) -> Tensor | None:
    """The smallest idle buffer of `size` bytes or more, perhaps a new one; None if no more can be kept."""
    mine = _kept.setdefault(model, [])
    first = bisect.bisect_left(mine, size, key=Tensor.numel)
    for buffer in mine[first:]:
        if _is_idle(buffer):
            return buffer
    # A new buffer replaces an idle one that is too small: so there are never more than were in use at once.
    for place in reversed(range(first)):
        if _is_idle(mine[place]):
            del mine[place]
            break
    step = 1 << max(size.bit_length() - 3, 0)  # so that sizes which differ by little fit one buffer
    size = -(-size // step) * step
    if not _COUNTS or not limits.may_keep(size, taken=nbytes()):
        return None
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    if type(buffer) is not Tensor:  # a mode that fakes tensors is active: no later call should get this one
        return None
    bisect.insort(mine, buffer, key=Tensor.numel)
    return buffer


def _references(buffer: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count


_COUNTS = hasattr(torch._C, "_storage_Use_Count")  # private to torch, and missing in the oldest version that we support
_ALONE = _references(torch.empty(1, device="cpu")) if _COUNTS else 0  # references to memory that only one tensor has


def _is_idle(buffer: Tensor) -> bool:
    return _references(buffer) == _ALONE
