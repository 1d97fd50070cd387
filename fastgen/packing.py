"""Linear layers on packed weights: with few rows, the decode step on a CPU is its matrix products.

oneDNN multiplies by a weight in its own blocked layout; torch's `linear` lays it out anew, or hands it to a
library that is slow on some processors. So a decode keeps a packed copy of each weight, wherever one timing
of the shape on the very products of the decode says that it pays. The arithmetic is float32 in another order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Tensor], Tensor]

_MIN_ELEMENTS = 2**16  # below, calling costs as much as multiplying
_MAX_ROWS = 512  # above, both are as fast as the machine
_TRIALS = 3  # timings of a shape on either side; the least counts
_MEMORY_SHARE = 8  # pack only what is less than this part of the memory that is left


@dataclass
class _Packed:
    """A packed copy, and what tells whether its weight is still the same."""

    weight: weakref.ref[Tensor]
    address: int
    version: int
    checksum: int
    copy: Tensor  # oneDNN's own layout
    nbytes: int

    def is_current(self, weight: Tensor | None) -> bool:
        return (
            weight is not None
            and self.weight() is weight
            and self.address == weight.data_ptr()
            and self.version == weight._version
            # Edits through `weight.data`, as adapters merge themselves, leave no other trace.
            and self.checksum == _checksum(weight)
        )


@dataclass
class _Trial:
    """Seconds of a shape's products so far."""

    stock: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)


_lock = threading.RLock()
_copies: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()
# (out, in, rows up to, threads) -> a trial under way, or whether packing pays
_verdicts: dict[tuple[int, int, int, int], _Trial | bool] = {}


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be packed here, or None. The operators are private to torch: try them."""
    try:
        weight, rows = torch.randn(48, 32), torch.randn(3, 1, 32)
        error = (_product(rows, _pack(weight), None) - nn.functional.linear(rows, weight)).abs().max()
        return None if float(error) < 1e-4 else f"torch's packed product is wrong by {float(error):.1e}"
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"this torch has no packed products ({str(error).splitlines()[0]})"


def nbytes() -> int:
    """The memory that packed copies take now."""
    with _lock:
        return sum(packed.nbytes for packed in _copies.values())


def count() -> int:
    """How many weights have a packed copy now."""
    with _lock:
        return len(_copies)


def release() -> None:
    """Drop all packed copies; what was learnt about shapes stays."""
    with _lock:
        _copies.clear()


class Packing:
    """The products of one decode over `model`: an object for one thread, the copies are everyone's.

    `mode`: "auto" packs where a timing says so, "always" packs everything, "off" nothing.
    """

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.products = 0  # on packed weights
        self._mode = mode
        self._plans: dict[tuple[int, int], Tensor | None] = {}  # (id of a layer, rows) -> packed copy
        self._off = mode == "off" or unavailable() is not None
        if not self._off:
            _drop_outdated(model)

    def __call__(self, layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool = False) -> Tensor:
        """`stock(layer, rows)` or the same product on the packed weight.

        Args:
            layer: has `weight`, `[out, in]` or, if `transposed`, `[in, out]`, and perhaps `bias` `[out]`.
            rows: `[..., in]`.
        """
        if self._off or rows.dim() < 2 or torch.compiler.is_compiling():
            return stock(layer, rows)
        number = rows.numel() // rows.shape[-1]
        key = (id(layer), number)
        if key not in self._plans:
            verdict = self._verdict(layer, rows, number, transposed)
            if isinstance(verdict, _Trial):
                return self._try(verdict, layer, rows, stock, transposed)
            self._plans[key] = _copy_of(layer, transposed) if verdict else None
        copy = self._plans[key]
        if copy is None:
            return stock(layer, rows)
        self.products += 1
        return _product(rows, copy, layer.bias)  # type: ignore[arg-type]

    def _verdict(self, layer: nn.Module, rows: Tensor, number: int, transposed: bool) -> _Trial | bool:
        weight = layer._parameters.get("weight")
        bias = layer._parameters.get("bias")
        plain = (
            type(weight) is nn.Parameter  # quantised and distributed weights are subclasses
            and weight.dtype == rows.dtype == torch.float32
            and weight.device.type == rows.device.type == "cpu"
            and weight.is_contiguous()
            and (bias is None or (type(bias) is nn.Parameter and bias.dtype == torch.float32))
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
        if not plain or number > _MAX_ROWS or self._mode == "always":
            return plain and number <= _MAX_ROWS
        assert weight is not None
        if weight.numel() < _MIN_ELEMENTS:
            return False
        shape = weight.shape[::-1] if transposed else weight.shape
        key = (shape[0], shape[1], 1 << (number - 1).bit_length(), torch.get_num_threads())
        with _lock:
            return _verdicts.setdefault(key, _Trial())

    def _try(self, trial: _Trial, layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool) -> Tensor:
        """One product of the decode, timed."""
        if len(trial.stock) < _TRIALS:
            start = time.perf_counter()
            output = stock(layer, rows)
            trial.stock.append(time.perf_counter() - start)
            return output
        copy = _copy_of(layer, transposed)
        if copy is None:
            return stock(layer, rows)
        start = time.perf_counter()
        output = _product(rows, copy, layer.bias)  # type: ignore[arg-type]
        trial.packed.append(time.perf_counter() - start)
        if len(trial.packed) >= _TRIALS:
            pays = min(trial.packed) < min(trial.stock)
            with _lock:
                _verdicts.update({key: pays for key, value in _verdicts.items() if value is trial})
                if not pays:
                    _drop_useless(layer.weight.shape)  # type: ignore[arg-type]
        self.products += 1
        return output


def _copy_of(layer: nn.Module, transposed: bool) -> Tensor | None:
    """The layer's packed weight, made now if there is none; None if memory is short."""
    with _lock:
        packed = _copies.get(layer)
        if packed is None:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            size = weight.numel() * weight.element_size()
            free = _free_memory()
            if free is not None and size * _MEMORY_SHARE > free:
                return None
            copy = _pack(weight.detach().t().contiguous() if transposed else weight.detach())
            checksum = _checksum(weight)
            packed = _Packed(weakref.ref(weight), weight.data_ptr(), weight._version, checksum, copy, size)
            _copies[layer] = packed
        return packed.copy


def _drop_outdated(model: nn.Module) -> None:
    with _lock:
        for module in model.modules():
            packed = _copies.get(module)
            if packed is not None and not packed.is_current(module._parameters.get("weight")):
                del _copies[module]


def _drop_useless(shape: torch.Size) -> None:
    """Drop the copies of weights of `shape` unless they pay for another number of rows."""
    sizes = {tuple(shape), tuple(shape[::-1])}
    if any(verdict is True and key[:2] in sizes for key, verdict in _verdicts.items()):
        return
    for module, packed in list(_copies.items()):
        if (weight := packed.weight()) is not None and weight.shape == shape:
            del _copies[module]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _checksum(weight: Tensor) -> int:
    """A sum of the bits: whatever changes a weight changes it, but for edits that cancel out. 40 GB/s here."""
    flat = weight.detach().reshape(-1)
    even = flat.numel() // 2 * 2
    if flat.data_ptr() % 8:
        return int(flat.view(torch.int32).sum())
    total = int(flat[:even].view(torch.int64).sum())
    return total + int(flat[even:].view(torch.int32).sum())


def _free_memory() -> int | None:
    """Bytes that can still be taken, by the machine and by the container; None where nobody says."""
    free: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not free:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(free, default=None)


def wrapped(current: Callable[[], Any], stock: Forward, transposed: bool = False) -> Forward:
    """A layer's `forward` that multiplies on packed weights while `current()` has a `packing`."""

    @functools.wraps(stock)
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        session = current()
        if session is None:
            return stock(self, input)
        output: Tensor = session.packing(self, input, stock, transposed)
        return output

    return forward
