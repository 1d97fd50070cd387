"""Chooses the attention kernel on CUDA devices: torch's, or one of ours in Triton, if trials find it better."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from fastgen import config, locks, phases
from fastgen.memory import cuda_graph

__phase__ = phases.ATTENTION

Attention = Callable[[Tensor, Tensor, Tensor, "Tensor | None", float], Tensor]
LatentAttention = Callable[[Tensor, Tensor, "Tensor | None", float], Tensor]

_WARM_UP, _TRIALS = 3, 9
_IN_A_GRAPH = 8  # calls, so that the graph's own launch counts little

_are_captured: contextvars.ContextVar[bool] = contextvars.ContextVar("fastgen_steps_are_captured", default=False)
_lock = locks.reentrant_lock()
Verdicts = dict[tuple[Any, ...], bool]  # kernel and kind of arguments -> whether our kernel is better
_verdicts: Verdicts = {}
_of_weights: dict[StorageWeakRef, Verdicts] = {}  # of trials that depend on a weight, by the weight's storage


@dataclass(frozen=True)
class Trial:
    """How exact a kernel's output for some arguments has to be, and which kernel of torch's it has to outrun."""

    arguments: tuple[Any, ...]
    torchs: Callable[..., Tensor]
    exact: Callable[[], Tensor]
    allowed: Callable[[], Tensor]  # an output whose error our kernel may have twice,
    resolved: float = 0.0  # plus this
    finished: Callable[[Tensor], Tensor] = lambda output: output  # turns a kernel's output into one to compare

    def is_exact(self, ours: Callable[..., Tensor]) -> bool:
        try:
            outputs, exact = (self.finished(ours(*self.arguments)), self.allowed()), self.exact()
            is_finite = exact.isfinite()  # a row whose scores are all -inf is NaN, or zeros, as the kernel has it
            off, allowed = (float((output - exact)[is_finite].abs().max()) for output in outputs)
            return off <= 2 * allowed + self.resolved  # not if one is NaN
        except Exception:  # it cannot be compiled for this device, or memory is short: torch's kernel is there
            return False

    def is_faster(self, ours: Callable[..., Tensor]) -> bool:
        try:
            times = _milliseconds_in_a_graph if _are_captured.get() else _milliseconds
            return times(ours, *self.arguments) < times(self.torchs, *self.arguments)
        except Exception:  # as above
            return False


@contextlib.contextmanager
def for_graphs() -> Iterator[None]:
    """Inside the block, kernels are chosen for steps that are captured: launching one then costs nothing."""
    token = _are_captured.set(True)
    try:
        yield
    finally:
        _are_captured.reset(token)


def kernel_for(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, torchs: Attention
) -> Attention | None:
    """Our kernel if it is better than `torchs` for arguments like these, which are `beam_attention`'s, or None.

    The first arguments of each kind are tried, which takes some milliseconds; none while a graph is captured.
    """
    kernel = _kernel("triton_attention")
    if kernel is None or kernel.unsupported(query, key, value):
        return None
    batch, key_heads, keys, size = key.shape
    rows = query.shape[0] // batch * (query.shape[1] // key_heads)
    shape = (batch * key_heads, rows, size, value.shape[3], keys.bit_length(), bias is None)
    arguments = (query, key, value, bias, scale)

    def exact() -> Tensor:
        precise = torch.float64 if query.dtype == torch.float32 else torch.float32
        rest = (key.to(precise), value.to(precise), None if bias is None else bias.to(precise))
        return torchs(query.to(precise), *rest, scale)

    ours: Attention = kernel.beam_attention
    trial = Trial(arguments, torchs, exact, lambda: torchs(*arguments), torch.finfo(query.dtype).eps)
    kind = ("beam", query.device, query.dtype, *shape, query.is_inference(), _are_captured.get())
    is_better = _verdict(_verdicts, kind, query.device, lambda: trial.is_exact(ours) and trial.is_faster(ours))
    return ours if is_better else None


def latent_kernel_for(trial: Trial, weight: Tensor) -> LatentAttention | None:
    """The cheapest of our kernels for `latent_attention` that is better than torch's by the `trial`, or None.

    Like `kernel_for`, but how exact a kernel is depends on the `weight` that absorbed the query, and is tried for each
    layer. How fast a kernel is depends on the shape alone.
    """
    kernel = _kernel("triton_latent")
    query, latent, bias, _ = trial.arguments
    if kernel is None or kernel.unsupported(query, latent):
        return None
    batch, _, keys, size = latent.shape
    device = query.device
    rows = query.shape[0] // batch * query.shape[1]
    shape = (batch, rows, size, bias is None, query.is_inference(), _are_captured.get())
    version = None if weight.is_inference() else weight._version
    with _lock:
        for gone in [memory for memory in _of_weights if memory.expired()]:
            del _of_weights[gone]
        its = _of_weights.setdefault(StorageWeakRef(weight.untyped_storage()), {})
    for terms in kernel.TERMS:
        ours = functools.partial(kernel.latent_attention, terms=terms)
        kind = ("latent", terms, device, latent.dtype, keys.bit_length())
        if _verdict(
            its, (*kind, weight.storage_offset(), version), device, functools.partial(trial.is_exact, ours)
        ) and _verdict(_verdicts, (*kind, *shape), device, functools.partial(trial.is_faster, ours)):
            return ours
    return None


def _verdict(verdicts: Verdicts, kind: tuple[Any, ...], device: torch.device, is_better: Callable[[], bool]) -> bool:
    """Whether our kernel was better in the trial of this kind, held now if needed; False while a graph is captured."""
    # A timing decides, so two runs may round differently: no trial where the user has forbidden that.
    if torch.are_deterministic_algorithms_enabled():
        return False
    if kind not in verdicts:
        if _is_capturing(device):
            return False
        with _disable_current_modes():  # a mode that records a step is not to see the trial
            verdict = is_better()
        with _lock:
            verdicts[kind] = verdict
    return verdicts[kind]


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


@functools.cache
def _kernel(module: str) -> Any:
    """The module of `fastgen.ops` of this name; None without Triton or under FASTGEN_NATIVE=0."""
    if config.native() == "0":
        return None
    try:
        return importlib.import_module(f"fastgen.ops.{module}")
    except ImportError:
        return None


def _milliseconds_in_a_graph(attend: Callable[..., Tensor], *arguments: Any) -> float:
    """The median time of a call in a CUDA graph: what it takes the device, without the time to launch its kernels."""
    attend(*arguments)  # compiles a kernel
    graph = torch.cuda.CUDAGraph()
    device = arguments[0].device
    cuda_graph.capture(graph, lambda: [attend(*arguments) for _ in range(_IN_A_GRAPH)][-1], device)
    return _milliseconds(lambda *_: graph.replay(), *arguments) / _IN_A_GRAPH


def _milliseconds(attend: Callable[..., Any], *arguments: Any) -> float:
    """The median time of some calls, on the device."""
    device = arguments[0].device
    found: list[float] = []
    for i in range(_WARM_UP + _TRIALS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            attend(*arguments)
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            began = time.perf_counter()
            attend(*arguments)
            elapsed = 1e3 * (time.perf_counter() - began)
        if i >= _WARM_UP:
            found.append(elapsed)
    return statistics.median(found)
