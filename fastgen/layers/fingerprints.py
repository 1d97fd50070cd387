"""Fingerprints of weights, which tell whether a copy that was derived from a weight is still up to date.

No other sign of an edit can be relied on. A tensor's version does not change when code writes through `.data`, numpy or
DLPack; it is 0 in a tensor that has replaced another, and does not exist in inference mode. The address tells nothing
either: freed memory is given to the next tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastgen import ops

State = Hashable


def state_of(tensor: Tensor) -> State:
    """A value that is equal for tensors of the same numbers, bit for bit, shape and dtype, and differs for others.

    See `fastgen.ops.fingerprint` for the odds that an edit is missed. It costs one reading of the tensor.

    Args:
        tensor: of any shape, dtype, device and strides.
    """
    return states_of([tensor])[0]


def states_of(tensors: Iterable[Tensor]) -> tuple[State, ...]:
    """`state_of` of each tensor; the device is waited for only once all are under way."""
    tensors = list(tensors)
    with _disable_current_modes():  # a mode that records a step is not to see this
        found = [ops.fingerprint(_as_matrix(tensor)) for tensor in tensors]
        return tuple((tensor.dtype, tensor.shape, int(one)) for tensor, one in zip(tensors, found, strict=True))


@torch.no_grad()
def _as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as `[rows, size]`, a view if possible."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
