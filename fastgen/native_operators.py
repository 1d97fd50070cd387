"""Our operators for what computes with them, no earlier than that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def native_operator(name: str) -> Callable[..., Any] | None:
    """`torch.ops.fastgen.<name>` for tensors on the CPU, where it is native there."""
    from fastgen import ops  # loads or even compiles them all, so not before one is needed

    return getattr(torch.ops.fastgen, name).default if ops.is_native(torch.device("cpu")) else None
