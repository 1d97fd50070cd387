"""Checks of arguments that several operators share; csrc/arguments.h has the same checks in C++."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = (torch.int64, torch.int32)
SCORES = (torch.float32, torch.float16, torch.bfloat16)


def check_width(name: str, tensor: Tensor | None, width: int) -> None:
    if tensor is not None and tensor.shape != (width,):
        raise ValueError(f"{name} must be [{width}], not of shape {list(tensor.shape)}.")


def check_floats(whose: str, like: Tensor, *tensors: tuple[str, Tensor | None], or_half: bool = False) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.dtype not in (SCORES if or_half else SCORES[:1]):
            raise TypeError(f"{name} must be float32{', float16 or bfloat16' if or_half else ''}, not {tensor.dtype}.")
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{whose} on {like.device} and {name} on {tensor.device}.")


def check_codes(codes: Tensor, rows: Tensor) -> None:
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be int8, not {codes.dtype}.")
    if codes.device != rows.device:
        raise ValueError(f"rows are on {rows.device} and codes on {codes.device}.")
