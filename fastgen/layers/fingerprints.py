"""What weights hold, to tell whether something that was derived from one is still what would be derived now.

No other sign of an edit can be relied on. A tensor's version is left alone by whoever writes through `.data`, numpy or
DLPack, is back at 0 in a tensor that has taken another's place, and is none in inference mode; memory that is freed is
given to the next tensor at the same address.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastgen import ops

State = Hashable


def state_of(tensor: Tensor) -> State:
    """Equal for equal numbers, bit for bit, of the same shape and dtype; different for others.

    See `fastgen.ops.fingerprint` for the odds that an edit is missed. It costs one reading of the tensor.

    Args:
        tensor: of any shape, dtype, device and strides.
    """
    return states_of([tensor])[0]


def states_of(tensors: Iterable[Tensor]) -> tuple[State, ...]:
    """`state_of` each; a device is waited for once all are under way."""
    tensors = list(tensors)
    with _disable_current_modes():  # whoever records a step: this is no part of it
        found = [ops.fingerprint(_as_matrix(tensor)) for tensor in tensors]
        return tuple((tensor.dtype, tensor.shape, int(one)) for tensor, one in zip(tensors, found, strict=True))


@torch.no_grad()
def _as_matrix(tensor: Tensor) -> Tensor:
    """`[rows, size]`, a view if it can be."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
