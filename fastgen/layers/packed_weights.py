"""Packed weights: copies in the order in which a product reads them; torch's own products pack at each call.

They are multiplied by our own operator where it is native, else by oneDNN's, which is private to torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen import locks, report
from fastgen.layers.fingerprints import State, state_of
from fastgen.layers.input_fusion import unfusable
from fastgen.memory import arena, limits
from fastgen.memory.release import keeper
from fastgen.ops import native_operator

Copy = Any  # what `pack` returns, the weight in 16 bits, or what `screened_linear` reads in place of the weight
_SLAB = 256  # rows and columns that are compared at a time
HALVES = (torch.float16, torch.bfloat16)


class Rounded(NamedTuple):
    """A weight that was rounded to fewer bits, and what is known of it."""

    numbers: Tensor  # bfloat16, as it is or packed by oneDNN; or int8, see `ops.quantize_weight`
    scales: Tensor | None  # of int8
    errors: dict[Any, float]  # how far each product that was tried with them was off
    chosen_by: set[str]  # "user", if the user has chosen fewer bits for this weight


class _Source:
    """A weight that was copied, and a fingerprint of the numbers that it held then.

    It refers to no tensor: `torch.utils.swap_tensors` refuses tensors with weak references.
    """

    def __init__(self, layer: nn.Module) -> None:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        self.layer, self.state = weakref.ref(layer), state_of(weight)
        self.nbytes = weight.numel() * weight.element_size()

    def is_current(self, states: dict[int, State]) -> bool:
        """Whether the weight is unchanged; `states`: fingerprints by id of the layer, to which this one is added."""
        layer = self.layer()
        weight = None if layer is None else layer._parameters.get("weight")
        if weight is None:
            return False
        if id(layer) not in states:
            states[id(layer)] = state_of(weight)
        return self.state == states[id(layer)]


@dataclass
class _Packed:
    """A packed copy of one weight, or of the weights of sibling layers, concatenated."""

    sources: list[_Source]
    copy: Copy

    @property
    def nbytes(self) -> int:
        parts = self.copy if isinstance(self.copy, tuple) else (self.copy,)
        if isinstance(self.copy, tuple) or self.copy.dtype in HALVES:
            return sum(part.nbytes for part in parts if isinstance(part, Tensor))
        return sum(source.nbytes for source in self.sources)  # oneDNN does not say

    @property
    def layers(self) -> tuple[Any, ...]:
        return tuple(source.layer() for source in self.sources)


_lock = locks.reentrant_lock()
_copies: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()
_joint: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()  # by the first of the siblings
_halves: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()
_screenings: weakref.WeakKeyDictionary[nn.Module, _Packed] = weakref.WeakKeyDictionary()
# By the name of what makes them.
_rounded: dict[str, weakref.WeakKeyDictionary[nn.Module, _Packed]] = {
    name: weakref.WeakKeyDictionary() for name in ("int8", "bfloat16", "packed bfloat16")
}
# By layer: address and version of the weight, and which 16 bits hold it exactly, if any.
_are_half: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, int], torch.dtype | None]] = (
    weakref.WeakKeyDictionary()
)
_ALL = (_copies, _joint, _halves, _screenings, *_rounded.values())


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be packed here, or None. oneDNN's operators are private to torch, so they are tried."""
    if _native() is not None:
        return None
    try:
        weight, rows = _waves(48, 32), _waves(3, 1, 32)  # not random numbers: the user's random stream stays as it is
        error = (multiply(rows, pack(weight), None) - nn.functional.linear(rows, weight)).abs().max()
        return None if float(error) < 1e-4 else f"torch's packed product is wrong by {float(error):.1e}"
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"this torch has no packed products ({str(error).splitlines()[0]})"


def _waves(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32, device="cpu").sin().view(shape)


@report.provides("packed_bytes")
def nbytes() -> int:
    """Bytes that packed copies take now."""
    with _lock:
        return sum(packed.nbytes for kind in _ALL for packed in kind.values())


@report.provides("packed_weights")
def count() -> int:
    """How many weights have a packed copy now."""
    with _lock:
        return sum(len(packed.sources) for kind in _ALL for packed in kind.values())


@keeper
def release() -> None:
    """Drop all packed copies; timings of shapes stay."""
    with _lock:
        for kind in _ALL:
            kind.clear()
        _are_half.clear()


def copy_of(layer: nn.Module, transposed: bool) -> Copy | None:
    """The layer's packed weight, made now if there is none; None if memory is short."""
    with _lock:
        packed = _copies.get(layer)
        if packed is None:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            weight = weight.detach().t() if transposed else weight.detach()
            packed = _packed([layer], lambda: pack(weight), weight.nbytes)
            if packed is None:
                return None
            _copies[layer] = packed
        return packed.copy


def copy_and_state(layer: nn.Module, transposed: bool) -> tuple[Copy, Any] | None:
    """The layer's packed weight, and the state of the weight that was packed; None if memory is short."""
    with _lock:
        if copy_of(layer, transposed) is None:
            return None
        packed = _copies[layer]
        return packed.copy, packed.sources[0].state


def dtype_of_halves(layer: nn.Module) -> torch.dtype | None:
    """Which 16-bit dtype holds the layer's weight exactly, float16 or bfloat16; None if neither does.

    The weights of many models that are published, or loaded, in float32 were in 16 bits before.

    A hint only: an edit that leaves address and version alone goes unseen. `half_of` looks at the weight itself.
    """
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    seen = (weight.data_ptr(), weight._version)
    with _lock:
        known = _are_half.get(layer)
        if known is None or known[0] != seen:
            exact = next((dtype for dtype in HALVES if _are_equal(weight, weight, dtype)), None)
            known = _are_half[layer] = (seen, exact)
        return known[1]


def _are_equal(halves: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `halves`, rounded to `dtype`, equals `weight`, both `[out, in]`; the first part mostly decides."""
    with arena.outside():
        return all(
            torch.equal(half.to(dtype).float(), part) for half, part in zip(_parts(halves), _parts(weight), strict=True)
        )


def _parts(weight: Tensor) -> Iterator[Tensor]:
    return (part for slab in weight.split(_SLAB) for part in slab.split(_SLAB, 1))


def half_of(layer: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """A copy of the layer's weight in its `dtype_of_halves`; None if memory is short or the weight was edited."""
    with _lock:
        packed = _halves.get(layer)
        if packed is None or packed.copy.dtype != dtype:  # edited, and held by other 16 bits now
            weight: Tensor = layer.weight.detach()  # type: ignore[operator]
            size = weight.nbytes // 2
            _make_room(size)
            packed = _packed([layer], lambda: weight.to(dtype), size)
            if packed is None:
                return None
            if not _are_equal(packed.copy, weight, dtype):  # edited since, without a new version
                _are_half[layer] = ((weight.data_ptr(), weight._version), None)
                return None
            _halves[layer] = packed
        half: Tensor = packed.copy
        return half


def _make_room(size: int) -> None:
    """Drop packed copies until `size` bytes fit, if they can: for many rows, as of a prompt, which is read before the
    steps; but each step reads all weights for one token."""
    packed = sum(each.nbytes for kind in (_copies, _joint) for each in kind.values())
    if not limits.may_keep(size - packed, taken=nbytes()):
        return  # not even without them
    while not limits.may_keep(size, taken=nbytes()) and (kind := _copies or _joint):
        with contextlib.suppress(KeyError):  # a layer that has just died
            kind.popitem()


def screening_of(layer: nn.Module) -> Copy | None:
    """`screen_weight` of the layer's weight; None if memory is short."""
    from fastgen import ops

    return _in_fewer_bits(_screenings, layer, ops.screen_weight, False, 8)


def rounded_of(
    layer: nn.Module, name: str, make: Callable[[Tensor], Rounded], transposed: bool, bits: int
) -> Rounded | None:
    """The layer's weight in fewer bits, as `make` makes it of a weight `[out, in]`; None if memory is short.

    `name`: of what `make` makes, one of those in `_rounded`.
    """
    return _in_fewer_bits(_rounded[name], layer, make, transposed, bits)


def drop_rounded(layers: Iterable[nn.Module], is_meant: Callable[[Rounded], bool]) -> None:
    """Drop what `rounded_of` has made for these layers, if it `is_meant`."""
    with _lock:
        for layer in layers:
            for kept in _rounded.values():
                if (packed := kept.get(layer)) is not None and is_meant(packed.copy):
                    del kept[layer]


def all_rounded() -> list[tuple[str, Any, Rounded]]:
    """Names and layers, and what `rounded_of` has returned for them."""
    with _lock:
        return [(name, layer, packed.copy) for name, kept in _rounded.items() for layer, packed in kept.items()]


def _in_fewer_bits(
    kept: MutableMapping[nn.Module, _Packed],
    layer: nn.Module,
    make: Callable[[Tensor], Copy],
    transposed: bool,
    bits: int,
) -> Copy | None:
    with _lock:
        packed = kept.get(layer)
        if packed is None:
            weight: Tensor = layer.weight.detach()  # type: ignore[operator]
            size = weight.nbytes * bits // 32
            packed = _packed([layer], lambda: make(weight.t() if transposed else weight), size)
            if packed is None:
                return None
            kept[layer] = packed
        return packed.copy


def joint(layer: nn.Module) -> _Packed | None:
    """The joint copy of this layer, the first of siblings, and the others; None once they are called apart."""
    with _lock:
        packed = _joint.get(layer)
        if packed is not None and not unfusable.isdisjoint(packed.layers):
            del _joint[layer]
            return None
        return packed


def join(siblings: list[nn.Module]) -> bool:
    """Give these layers one packed copy instead of one each; False if memory is short."""
    with _lock:
        weights: list[Tensor] = [layer.weight.detach() for layer in siblings]  # type: ignore[operator]
        packed = _packed(siblings, lambda: pack(torch.cat(weights)), sum(weight.nbytes for weight in weights))
        if packed is None:
            return False
        _joint[siblings[0]] = packed
        for layer in siblings:
            _copies.pop(layer, None)
        return True


def _packed(layers: list[nn.Module], make: Callable[[], Copy], size: int) -> _Packed | None:
    """The copy of `size` bytes that `make` returns, with the layers it is made from; None if memory is short."""
    if not limits.may_keep(size, taken=nbytes()):
        return None
    sources = [_Source(layer) for layer in layers]
    try:
        with arena.outside():
            return _Packed(sources, make())
    except (RuntimeError, MemoryError):  # no memory after all: a copy is only ever an extra
        return None


def copies_of(layer: nn.Module) -> list[Copy]:
    """All copies of the layer's weight: packed, joint where this layer is the first, and in fewer bits."""
    with _lock:
        return [packed.copy for copies in _ALL if (packed := copies.get(layer)) is not None]


def drop_outdated(layer: nn.Module) -> None:
    """Drop the layer's copies if the numbers in the weights have changed since, by whatever means."""
    states: dict[int, State] = {}
    with _lock:
        for copies in _ALL:
            packed = copies.get(layer)
            if packed is not None and not all(source.is_current(states) for source in packed.sources):
                del copies[layer]
                _are_half.pop(layer, None)


_native = functools.partial(native_operator, "packed_linear")


def is_native() -> bool:
    """Whether packed weights are multiplied by our own operator."""
    return _native() is not None


def pack(weight: Tensor) -> Copy:
    """A copy of `weight`, float32 `[out, in]`, for `multiply`."""
    if _native() is None:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    from fastgen import ops

    return ops.pack_weight(weight), len(weight)


def multiply(rows: Tensor, packed: Copy, bias: Tensor | None) -> Tensor:
    """`linear(rows, weight, bias)` with a packed weight."""
    if isinstance(packed, tuple):
        return torch.ops.fastgen.packed_linear.default(rows, *packed, bias)
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
