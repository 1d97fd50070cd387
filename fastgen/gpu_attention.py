"""Which kernel attends on a CUDA device: torch's, or ours in Triton if a trial finds that as exact and faster."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastgen import config

Attention = Callable[[Tensor, Tensor, Tensor, "Tensor | None", float], Tensor]

_WARM_UP, _TRIALS = 3, 9

_lock = threading.Lock()
# (device, dtype, key heads of all sentences, rows of each, sizes of keys and values, bits of the number of keys,
# whether there is a bias) -> whether ours is to be taken
_verdicts: dict[tuple[Any, ...], bool] = {}


def kernel_for(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, torchs: Attention
) -> Attention | None:
    """Our kernel if it is better than `torchs` for arguments like these, which are `beam_attention`'s, or None.

    The first of their kind are tried, which takes some milliseconds; while a graph is captured, none are.
    """
    kernel = _kernel()
    # A timing decides, so two runs may round differently: not where the user has forbidden that.
    if kernel is None or torch.are_deterministic_algorithms_enabled() or kernel.unsupported(query, key, value):
        return None
    batch, key_heads, keys, size = key.shape
    rows = query.shape[0] // batch * (query.shape[1] // key_heads)
    shape = (batch * key_heads, rows, size, value.shape[3], keys.bit_length(), bias is None)
    kind = (query.device, query.dtype, *shape, query.is_inference())
    ours: Attention = kernel.beam_attention
    if kind not in _verdicts:
        if _is_capturing(query.device):
            return None
        with _disable_current_modes():  # this is no part of a step
            verdict = _is_better(ours, torchs, query, key, value, bias, scale)
        with _lock:
            _verdicts[kind] = verdict
    return ours if _verdicts[kind] else None


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


@functools.cache
def _kernel() -> Any:
    """The module of our kernel, None where there is no Triton or the user wants none."""
    if config.native() == "0":
        return None
    try:
        from fastgen.ops import triton_attention
    except ImportError:
        return None
    return triton_attention


def _is_better(
    ours: Attention, torchs: Attention, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> bool:
    """Whether `ours` is off by no more than twice what `torchs` is off by, and faster."""
    arguments = (query, key, value, bias, scale)
    try:
        mine, theirs = ours(*arguments), torchs(*arguments)
        precise = torch.float64 if query.dtype == torch.float32 else torch.float32
        bias = None if bias is None else bias.to(precise)
        exact = torchs(query.to(precise), key.to(precise), value.to(precise), bias, scale)
        is_finite = exact.isfinite()  # a row whose scores are all -inf is NaN, or zeros, as the kernel has it
        off, allowed = (float((output - exact)[is_finite].abs().max()) for output in (mine, theirs))
        if not off <= 2 * allowed + torch.finfo(query.dtype).eps:  # nor if one is NaN
            return False
        return _milliseconds(ours, *arguments) < _milliseconds(torchs, *arguments)
    except Exception:  # a device that it cannot be compiled for, memory: torch's own is there
        return False


def _milliseconds(attend: Attention, *arguments: Any) -> float:
    """The median of some calls, on the device."""
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
