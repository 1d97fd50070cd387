"""Linear layers on packed weights: with few rows, the decode step on a CPU is its matrix products.

oneDNN multiplies by a weight in its own blocked layout; torch's `linear` lays it out anew, or hands it to a
library that is slow on some processors. So a decode keeps a packed copy of each weight, wherever a timing
of the shape says that it pays, and one for projections that share an input. The arithmetic is float32 in another
order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import memory
from fastgen.siblings import Siblings, loners

Forward = Callable[[nn.Module, Tensor], Tensor]

_MIN_ELEMENTS = 2**16  # below, calling costs as much as multiplying
_FEW_ROWS = 32  # one timing up to here, another from here on
_TRIAL_ROWS = 512  # at most, in a timing
# Timings of a shape on either side: as many as fit into these seconds, three at least; some calls before warm it up.
_TRIALS, _TRIAL_SECONDS, _WARM_UP = 20, 0.02, 3
_PASSING_BYTES = 2**26  # of weights that pass by while a shape is timed


class _Source:
    """A weight that was packed, and what tells whether it is still the same."""

    def __init__(self, layer: nn.Module) -> None:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        self.layer, self.weight = weakref.ref(layer), weakref.ref(weight)
        self.address, self.version, self.checksum = weight.data_ptr(), weight._version, _checksum(weight)
        self.nbytes = weight.numel() * weight.element_size()

    def is_current(self) -> bool:
        layer = self.layer()
        weight = None if layer is None else layer._parameters.get("weight")
        return (
            weight is not None
            and self.weight() is weight
            and self.address == weight.data_ptr()
            and self.version == weight._version
            # Edits through `weight.data`, as adapters merge themselves, leave no other trace.
            and self.checksum == _checksum(weight)
        )


@dataclass
class _Packed:
    """A packed copy of a weight or, one below the other, of those of siblings."""

    sources: list[_Source]
    copy: Tensor  # oneDNN's own layout

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


@dataclass
class _Plan:
    """How one decode multiplies by a layer."""

    copy: Tensor
    bias: Tensor | None
    layers: tuple[nn.Module, ...] = ()  # of a joint product, this one first


_lock = threading.RLock()
_copies: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()
_joint: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()  # by the first of the siblings
_verdicts: dict[tuple[int, int, bool, int], bool] = {}  # (out, in, few rows, threads) -> whether packing pays


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be packed here, or None. The operators are private to torch: try them."""
    try:
        weight, rows = _waves(48, 32), _waves(3, 1, 32)  # nothing random: the user's seed is the user's
        error = (_product(rows, _pack(weight), None) - nn.functional.linear(rows, weight)).abs().max()
        return None if float(error) < 1e-4 else f"torch's packed product is wrong by {float(error):.1e}"
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"this torch has no packed products ({str(error).splitlines()[0]})"


def _waves(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).sin().view(shape)


def nbytes() -> int:
    """The memory that packed copies take now."""
    with _lock:
        return sum(packed.nbytes for packed in (*_copies.values(), *_joint.values()))


def count() -> int:
    """How many weights have a packed copy now."""
    with _lock:
        return sum(len(packed.sources) for packed in (*_copies.values(), *_joint.values()))


def release() -> None:
    """Drop all packed copies; what was learnt about shapes stays."""
    with _lock:
        _copies.clear()
        _joint.clear()


class Packing:
    """The products of one call: an object for one thread, the copies are everyone's.

    `mode`: "auto" packs where a timing says so, "always" packs everything, "off" nothing.
    """

    def __init__(self, mode: str) -> None:
        self.products = 0  # on packed weights
        self._mode = mode
        self._plans: dict[tuple[int, int], _Plan | None] = {}  # by id of a layer and number of rows
        self._siblings = Siblings()
        self._checked: set[int] = set()  # ids of layers whose copies are up to date
        self._off = mode == "off" or unavailable() is not None

    def __call__(self, layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool = False) -> Tensor:
        """`stock(layer, rows)` or the same product on the packed weight.

        Args:
            layer: has `weight`, `[out, in]` or, if `transposed`, `[in, out]`, and perhaps `bias` `[out]`.
            rows: `[..., in]`.
        """
        if self._off or rows.dim() < 2 or torch.compiler.is_dynamo_compiling():
            return stock(layer, rows)
        if (output := self._siblings.take(layer, rows)) is not None:
            self.products += 1
            return output
        number = rows.numel() // rows.shape[-1]
        key = (id(layer), number)
        if key not in self._plans:
            self._plans[key] = self._plan(layer, rows, number, transposed)
        plan = self._plans[key]
        if plan is not None and plan.layers and layer in loners:
            plan = self._plans[key] = self._plan(layer, rows, number, transposed)
        if plan is None:
            return stock(layer, rows)
        self.products += 1
        if (siblings := self._siblings.turn_to(rows)) and _join(siblings):
            joined = set(map(id, siblings))
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] not in joined}
        output = _product(rows, plan.copy, plan.bias)
        if plan.layers:
            return self._siblings.split(plan.layers, output)
        if not transposed:
            self._siblings.note(layer)
        return output

    def _plan(self, layer: nn.Module, rows: Tensor, number: int, transposed: bool) -> _Plan | None:
        if id(layer) not in self._checked:
            _drop_outdated(layer)
            self._checked.add(id(layer))
        if not self._pays(layer, rows, number, transposed):
            return None
        joint = _joint.get(layer)
        if joint is not None and not rows.is_inference():
            layers: list[Any] = [source.layer() for source in joint.sources]
            if loners.isdisjoint(layers):
                return _Plan(joint.copy, _joint_bias(layers), tuple(layers))
            del _joint[layer]
        copy = _copy_of(layer, transposed)
        return None if copy is None else _Plan(copy, layer.bias)  # type: ignore[arg-type]

    def _pays(self, layer: nn.Module, rows: Tensor, number: int, transposed: bool) -> bool:
        weight = layer._parameters.get("weight")
        bias = layer._parameters.get("bias")
        plain = (
            type(weight) is nn.Parameter  # quantised and distributed weights are subclasses
            and weight.dtype == rows.dtype == torch.float32
            and weight.device.type == rows.device.type == "cpu"
            and weight.is_contiguous()
            and not weight.is_inference()  # has no version to tell changes by
            and (bias is None or (type(bias) is nn.Parameter and bias.dtype == torch.float32))
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
        if not plain or self._mode == "always":
            return plain
        assert weight is not None
        # A timing decides, so two runs may round differently: not where the user has forbidden that.
        if weight.numel() < _MIN_ELEMENTS or torch.are_deterministic_algorithms_enabled():
            return False
        shape = weight.shape[::-1] if transposed else weight.shape
        key = (shape[0], shape[1], number <= _FEW_ROWS, torch.get_num_threads())
        if key not in _verdicts:
            copy = _copy_of(layer, transposed)
            if copy is None:
                return False
            sample = rows.flatten(0, -2)[:_TRIAL_ROWS]
            try:
                pays = _is_faster_packed(weight.detach().t() if transposed else weight.detach(), sample, bias)
            except (RuntimeError, MemoryError):  # no memory for the trial
                pays = False
            with _lock:
                _verdicts[key] = pays
                if not pays:
                    _drop_useless(weight.shape)
        return _verdicts[key]


def _is_faster_packed(weight: Tensor, rows: Tensor, bias: Tensor | None) -> bool:
    """Time both products of `rows` and `weight` `[out, in]`, in turn over many copies of the weight.

    In a decode step one weight after the other comes from memory; a single one would wait in the nearest cache.
    """
    fitting = _PASSING_BYTES // (weight.numel() * weight.element_size())
    count = max(1, min(fitting, _TRIALS + _WARM_UP))
    weights = [weight.clone() for _ in range(count)]  # keeps the strides
    theirs = _median_seconds(lambda i: nn.functional.linear(rows, weights[i % count], bias))
    weights = [_pack(copy.contiguous()) for copy in weights]
    return _median_seconds(lambda i: _product(rows, weights[i % count], bias)) < theirs


def _median_seconds(product: Callable[[int], Tensor]) -> float:
    for i in range(_WARM_UP):
        product(-1 - i)
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < _TRIALS and sum(seconds) < _TRIAL_SECONDS):
        start = time.perf_counter()
        product(len(seconds))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _copy_of(layer: nn.Module, transposed: bool) -> Tensor | None:
    """The layer's packed weight, made now if there is none; None if memory is short."""
    with _lock:
        packed = _copies.get(layer)
        if packed is None:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            packed = _packed([layer], weight.detach().t() if transposed else weight.detach())
            if packed is None:
                return None
            _copies[layer] = packed
        return packed.copy


def _join(siblings: list[nn.Module]) -> bool:
    """Give these layers one packed copy instead of one each; False if memory is short."""
    with _lock:
        packed = _packed(siblings, torch.cat([layer.weight.detach() for layer in siblings]))  # type: ignore[operator]
        if packed is None:
            return False
        _joint[siblings[0]] = packed
        for layer in siblings:
            _copies.pop(layer, None)
        return True


def _packed(layers: list[nn.Module], weight: Tensor) -> _Packed | None:
    sources = [_Source(layer) for layer in layers]
    if not memory.may_keep(sum(source.nbytes for source in sources), taken=nbytes()):
        return None
    try:
        return _Packed(sources, _pack(weight.contiguous()))
    except (RuntimeError, MemoryError):  # no memory after all: a copy is only ever an extra
        return None


def _joint_bias(layers: list[Any]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers])


def _drop_outdated(layer: nn.Module) -> None:
    with _lock:
        for copies in (_copies, _joint):
            packed = copies.get(layer)
            if packed is not None and not all(source.is_current() for source in packed.sources):
                del copies[layer]


def _drop_useless(shape: torch.Size) -> None:
    """Drop the copies of weights of `shape` unless they pay for another number of rows."""
    sizes = {tuple(shape), tuple(shape[::-1])}
    if any(verdict is True and key[:2] in sizes for key, verdict in _verdicts.items()):
        return
    for module, packed in list(_copies.items()):
        if (weight := packed.sources[0].weight()) is not None and weight.shape == shape:
            del _copies[module]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _checksum(weight: Tensor) -> int:
    """A sum of the bits of each row, weighted by the row's place: all but edits that cancel out change it."""
    bits = weight.detach().flatten(1)
    wide = bits.shape[1] % 2 == 0 and bits.data_ptr() % 8 == 0  # two numbers at a time where they are aligned
    sums = bits.view(torch.int64 if wide else torch.int32).sum(1)
    return int((sums * torch.arange(1, 2 * len(sums), 2)).sum())


_thread = threading.local()


@contextlib.contextmanager
def using(packing: Packing) -> Iterator[None]:
    """Inside the block, `product` multiplies by `packing` in this thread."""
    outer: Packing | None = getattr(_thread, "packing", None)
    _thread.packing = packing
    try:
        yield
    finally:
        _thread.packing = outer


def product(layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool = False) -> Tensor:
    """`stock(layer, rows)`, on packed weights where this thread is `using` them."""
    packing: Packing | None = getattr(_thread, "packing", None)
    return stock(layer, rows) if packing is None else packing(layer, rows, stock, transposed)
