"""A CUDA device that is none: tensors that say `cuda:0`, whose numbers are in tensors of the CPU.

An operator given tensors of both devices raises, as on a GPU; whoever waits for the device, or copies from memory that
is not pinned, is noted with the line of code. What asks torch whether there is a GPU is told so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulated_graph
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fastgen
from fastgen.layers import attention_kernels
from fastgen.ops import operator
from fastgen.patching import foreign_code
from fastgen.replay import replayer, tape

DEVICE = torch.device("cuda:0")
_OURS = str(Path(fastgen.__file__).parent)
_HOSTS = ("/transformers/", "/fairseq/", "/whisper/")
aten = torch.ops.aten
# Modules that look at the types of tensors and weights, by host.
_BY_TYPE = {
    "torch": "memory.buffers patching.foreign_code replay.guards",
    "transformers": "cache.slim cache.state generate.processors model.facts",
    "fairseq": "foreign_code model.views",
}
# Operators that take a number in a CPU tensor without dimensions, beside the elementwise ones.
_TAKE_NUMBERS = {aten.where, aten.masked_fill, aten.masked_fill_, aten.index_put, aten.index_put_, aten.fill_}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten.copy_, aten._to_copy, aten._copy_from}


_NOT_THERE = 0  # what the CPU reads before a copy has arrived: to a search that it is at an end


class MixedDevices(RuntimeError):
    """An operator got tensors of the CPU and of the device."""


@dataclass(frozen=True)
class Wait:
    """The host waits for the device.

    `kind`: "read" a value or a shape, "upload" numbers from memory that is not pinned, wait for the latest "event", or
    for one before it ("late"), while the device has more to do.
    """

    kind: str
    operator: str
    where: str  # the innermost line of fastgen's or the host's

    @property
    def is_ours(self) -> bool:
        return self.where.startswith("fastgen/")


class CudaTensor(torch.Tensor):
    """A tensor that says it is on `cuda:0`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        assert type(inner) is torch.Tensor, type(inner)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _last[-1].dispatch(function, args, kwargs)  # outside the mode, or in another thread

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.inner!r})"

    def __deepcopy__(self, memo: Any) -> CudaTensor:
        return to_cuda(self.inner.clone())

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()


def to_cuda(value: Any) -> Any:
    """The same with tensors on the device."""
    if type(value) is torch.Tensor:
        return CudaTensor(value)
    if isinstance(value, dict):
        return type(value)({name: to_cuda(item) for name, item in value.items()})
    return value


def to_cpu(value: Any) -> Any:
    """The same with tensors on the CPU."""
    return pytree.tree_map_only(CudaTensor, lambda tensor: tensor.inner, value)


def to_cpu_output(output: Any) -> Any:
    """An output of `generate` with its tensors on the CPU."""
    return type(output)(**{name: to_cpu(value) for name, value in output.items() if "past" not in name})


def move(model: nn.Module) -> nn.Module:
    """Put a model's parameters and buffers on the device, in place, as `Module.to` does."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    wrapped = CudaTensor(tensor.detach())
                    moved[id(tensor)] = nn.Parameter(wrapped, False) if held is module._parameters else wrapped
                held[name] = moved[id(tensor)]
    return model


@dataclass(eq=False)
class Device(torch.utils._python_dispatch.TorchDispatchMode):
    """While it is active tensors are made on, and copied to, the device; see `waits`."""

    waits: list[Wait] = field(default_factory=list)
    pinned: list[torch.Tensor] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # operators that got tensors of two devices, with their places
    refused: list[str] = field(default_factory=list)  # why graphs were not captured
    is_capturing: bool = False
    events: int = 0
    pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # copies that have not arrived

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def here(self) -> Any:
        """A context in which the device is there in this thread, too."""
        modes = [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]
        return contextlib.nullcontext() if self in modes else self._there()

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # new tensors of Python's numbers are copied in the sight of modes
        try:
            with self:
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    def wait(self, kind: str, operator: str) -> None:
        self.waits.append(Wait(kind, operator, _where()))
        if kind in ("read", "event"):
            self.deliver(self.pending)
        if self.is_capturing:
            raise RuntimeError(f"{self.waits[-1]} while a graph is captured")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(function, args, kwargs)

    def dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs or {})
        if tape._is_composite(function):
            with self:
                outputs = function.decompose(*args, **kwargs)
            if outputs is not NotImplemented:
                return outputs
        if function.namespace == "fastgen":
            with self:
                return operator.OPERATORS[function._opname].reference(*args, **kwargs)
        return self._call(function, args, kwargs)

    def _call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        target = kwargs.get("device")
        is_copy = function is aten._to_copy.default
        if is_copy and target is not None and torch.device(target).type == "meta":  # what `cuda` becomes: `_guarded`
            kwargs["device"] = target = DEVICE
        is_pinned = bool(kwargs.pop("pin_memory", False))
        on_device = bool(ours) if target is None else torch.device(target).type == "cuda"
        if not ours and not on_device:
            outputs = function(*args, **kwargs)
            if is_pinned:
                self.pinned.append(outputs)
            return outputs
        self._check(function, args, kwargs, tensors, ours, on_device)
        if function is aten.copy_.default and self._is_late_copy(*args):
            self.pending.append((args[0], args[1].inner.clone()))
            return args[0].fill_(_NOT_THERE)
        if on_device and target is not None:
            kwargs["device"] = torch.device("cpu")
        given = {id(tensor.inner): tensor for tensor in ours}
        given_cpu = to_cpu(list(args))
        if function is aten.histc.default and not given_cpu[0].is_floating_point():  # which CUDA alone counts
            outputs = function(given_cpu[0].float(), *given_cpu[1:], **kwargs).to(given_cpu[0].dtype)
        else:
            outputs = function(*given_cpu, **to_cpu(kwargs))

        def wrapped(output: torch.Tensor) -> Any:
            if (known := given.get(id(output))) is not None:
                if known.shape != output.shape:  # `resize_`
                    known.data = CudaTensor(output)
                return known
            is_argument = any(output is tensor for tensor in tensors)  # `copy_` to the CPU
            return CudaTensor(output) if on_device and not is_argument else output

        return pytree.tree_map_only(torch.Tensor, wrapped, outputs)

    def _check(self, function: Any, args: Any, kwargs: Any, tensors: Any, ours: Any, on_device: bool) -> None:
        """Note who waits, and refuse tensors of two devices."""
        packet = function.overloadpacket
        others = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        if ours and tape.depends_on_values(function, args):
            self.wait("read", str(function))
        if packet in _COPIES:
            self._note_copy(function, args, kwargs, ours, on_device)
            return
        if not ours or not others:
            return
        if packet in _INDEXING and isinstance(args[0], CudaTensor):  # which moves indices by itself
            indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
            if any(not isinstance(index, CudaTensor) for index in indices):
                self.wait("upload", str(function))
            others = [other for other in others if not any(other is index for index in indices)]
        numbers = torch.Tag.pointwise in function.tags or packet in _TAKE_NUMBERS
        if any(other.dim() or not numbers for other in others):
            shapes = [(str(tensor.device), tuple(tensor.shape)) for tensor in tensors]
            self.mixed.append(f"{function} at {_where()}: {shapes}")
            raise MixedDevices(self.mixed[-1])

    def _is_late_copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
        """Whether `to.copy_(source, non_blocking)` comes from the device later, into memory that is pinned."""
        if not non_blocking or isinstance(to, CudaTensor) or not isinstance(source, CudaTensor):
            return False
        return any(_storage(to) == _storage(pinned) for pinned in self.pinned)

    def deliver(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Let copies from the device arrive."""
        for to, value in copies:
            to.copy_(value)
        arrived = set(map(id, copies))
        self.pending = [copy for copy in self.pending if id(copy) not in arrived]

    def _note_copy(self, function: Any, args: Any, kwargs: Any, ours: Any, on_device: bool) -> None:
        if function.overloadpacket is aten.copy_:
            to, source = args[0], args[1]
            to_device, is_from_device = isinstance(to, CudaTensor), isinstance(source, CudaTensor)
            if self._is_late_copy(*args):
                return
        else:
            source = args[0]
            to_device, is_from_device = on_device, isinstance(source, CudaTensor)
        if to_device == is_from_device:
            return
        self.wait("upload" if to_device else "read", str(function))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where() -> str:
    """The innermost line of fastgen's or the host's that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        line = f":{frame.f_lineno} {frame.f_code.co_name}"
        if name.startswith(_OURS) and name != tape.__file__:
            return f"fastgen{name[len(_OURS) :]}{line}"
        for host in _HOSTS:
            if f"site-packages{host}" in name:
                return name[name.rindex(host) + 1 :] + line
        frame = frame.f_back
    return "elsewhere"


_last = [Device()]  # the device of the innermost block


class _Kind(type):
    """`type` for code that asks for torch's own tensors by their types."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __call__(cls, value: Any) -> Any:
        if type(value) is CudaTensor:
            return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
        return type(value)


def _asking_for_types() -> Iterator[Any]:
    """The modules of `_BY_TYPE` of the hosts that are loaded."""
    for host, names in _BY_TYPE.items():
        if host in sys.modules:
            home = "fastgen" if host == "torch" else f"fastgen.optimizer.{host}"
            yield from (importlib.import_module(f"{home}.{name}") for name in names.split())


class _PlainType(metaclass=_Kind):
    pass


class _Noting(tape.Noting):
    """Looks on at a step before it is captured; one that waits is not."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.waits and f"{self.waits} waits for a value" not in _last[-1].refused:
            _last[-1].refused.append(f"{self.waits} waits for a value")


class _Graph(emulated_graph.Graph):
    """A graph during whose capture nobody may wait for the device."""

    def capture(self, function: Callable[[], Any], device: torch.device) -> Any:
        def captured() -> Any:
            _last[-1].is_capturing = True
            try:
                return function()
            finally:
                _last[-1].is_capturing = False

        try:
            return super().capture(captured, device)
        except RuntimeError as error:
            _last[-1].refused.append(str(error))
            raise


class Event:
    """Waiting for it is "late" if the device has been given another event since, and nothing the second time."""

    def __init__(self, device: Device, **_: Any) -> None:
        self._device, self._number, self._is_pending = device, 0, False

    def record(self, stream: Any = None) -> None:
        self._device.events += 1
        self._number, self._is_pending = self._device.events, True
        self._copies = list(self._device.pending)

    def synchronize(self) -> None:
        if self._is_pending:
            self._device.wait("event" if self._number == self._device.events else "late", "Event.synchronize")
            self._device.deliver(self._copies)
        self._is_pending = False


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Let torch change to the device and back, which does nothing: so it does for tensors of the type `meta`.

    A build without CUDA has no entry for it in the table of what changes devices.
    """
    torch._C._ensureCUDADeviceGuardSet()  # of a build with CUDA that finds no device
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10/core/DeviceType.h
    before = table[cuda]
    table[cuda] = before or table[meta]
    try:
        yield
    finally:
        table[cuda] = before


@contextlib.contextmanager
def device() -> Iterator[Device]:
    """Inside the block there is a CUDA device, for this thread alone."""
    operator.load()  # before a GPU seems to be there
    made = Device()
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: made.wait("event", "Stream.synchronize"))
    properties = SimpleNamespace(total_memory=1 << 34, multi_processor_count=100)
    replaced: dict[str, Callable[..., Any]] = dict(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        current_stream=lambda device=None: stream,
        is_current_stream_capturing=lambda: made.is_capturing,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (9, 0),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        mem_get_info=lambda device=None: (1 << 33, 1 << 34),
        memory_reserved=lambda device=None: 0,
        memory_allocated=lambda device=None: 0,
        synchronize=lambda device=None: made.wait("event", "synchronize"),
        Event=functools.partial(Event, made),
        stream=lambda stream: made.here(),
        device=lambda device: contextlib.nullcontext(),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(foreign_code, "_HARMLESS_MODES", (*foreign_code._HARMLESS_MODES, __name__))
        for module in _asking_for_types():
            patch.setattr(module, "type", _PlainType, raising=False)
        patch.setattr(replayer, "Noting", _Noting)
        patch.setitem(replayer.BACKENDS, "cuda", _Graph)
        patch.setattr(attention_kernels, "_kernel", lambda module: None)  # Triton is tested apart
        _last.append(made)
        try:
            with _guarded(), made.here():
                yield made
        finally:
            _last.pop()
