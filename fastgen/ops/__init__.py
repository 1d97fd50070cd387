"""Public operators of the decode loop: n-gram bans in place, exact top-k of the log-softmax, beam search, sampling,
attention of all beams of a sentence to its keys, and products with large weights.

They run on every device in plain torch, and natively where a library could be found or built (`fastgen.ops.library`;
`fastgen.status()` says which). They can be traced by `torch.compile(fullgraph=True)` and captured in CUDA graphs. They
are also `torch.ops.fastgen.*`, in plain torch until one of these functions has been called or compiled: the first call
loads the library, and the first on a machine compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastgen.ops import library, operator
from fastgen.ops.attention import beam_attention
from fastgen.ops.beam_search import advance_beams_, beam_candidates
from fastgen.ops.fingerprint import fingerprint
from fastgen.ops.linear import pack_weight, packed_linear, skinny_linear
from fastgen.ops.multinomial import multinomial
from fastgen.ops.ngrams import ban_repeated_ngrams_, ban_source_ngrams_
from fastgen.ops.path_attention import path_attention
from fastgen.ops.quantized import (
    dequantize,
    dynamic_quantized_linear,
    quantize_rows,
    quantize_weight,
    quantized_linear,
)
from fastgen.ops.screened import screen_weight, screened_linear
from fastgen.ops.topk import topk_log_softmax

__all__ = [
    "advance_beams_",
    "ban_repeated_ngrams_",
    "ban_source_ngrams_",
    "beam_attention",
    "beam_candidates",
    "dequantize",
    "dynamic_quantized_linear",
    "fingerprint",
    "is_native",
    "multinomial",
    "pack_weight",
    "packed_linear",
    "path_attention",
    "quantize_rows",
    "quantize_weight",
    "quantized_linear",
    "screen_weight",
    "screened_linear",
    "skinny_linear",
    "topk_log_softmax",
]


def is_native(device: torch.device) -> bool:
    """Whether the operators run natively on `device`, and not in plain torch."""
    operator.load()
    return library.is_loaded(device.type)


def has_runtime() -> bool:
    """Whether what reaches into torch itself (csrc/runtime) is native: arenas, recorded programs, sampling."""
    operator.load()
    return library.is_loaded("runtime")


@functools.cache
def native_operator(name: str) -> Callable[..., Any] | None:
    """`torch.ops.fastgen.<name>`, if it is native on the CPU; else None."""
    return getattr(torch.ops.fastgen, name).default if is_native(torch.device("cpu")) else None
