"""Packed products of weights that somebody else's code may edit at any time: each looks at its weight first.

Looking costs one reading of the weight, which pays where so many rows are multiplied that arithmetic takes longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.layers import packed_weights
from fastgen.ops import operator


class Weights(NamedTuple):
    """A weight, and a copy of what it was."""

    weight: Tensor  # float32 [out, in] or, if `transposed`, [in, out]
    packed: Tensor  # see `ops.pack_weight`
    fingerprint: int  # of the weight as it was copied
    transposed: bool = False


def _checked_linear(
    rows: Tensor, weight: Tensor, packed: Tensor, fingerprint: int, bias: Tensor | None, transposed: bool
) -> Tensor:
    """`linear(rows, weight, bias)`, by the copy if the weight is still what was copied.

    One operator, so that a captured step, which calls operators alone, looks at the weight at each replay.
    """
    if int(torch.ops.fastgen.fingerprint.default(weight.detach())) == fingerprint:
        width = weight.shape[1 if transposed else 0]
        output: Tensor = torch.ops.fastgen.packed_linear.default(rows, packed, width, bias)
        return output
    return F.linear(rows, weight.t() if transposed else weight, bias)


operator.register(
    "checked_linear",
    "(Tensor rows, Tensor weight, Tensor packed, int fingerprint, Tensor? bias, bool transposed) -> Tensor",
    _checked_linear,
    "CPU",
)


def multiply(rows: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
    """`linear(rows, weight, bias)`; rows float32 `[..., in]`."""
    weight, packed, fingerprint, transposed = weights
    output: Tensor = torch.ops.fastgen.checked_linear.default(rows, weight, packed, fingerprint, bias, transposed)
    return output


def prepare(weight: Tensor, transposed: bool = False) -> Weights:
    """What `multiply` takes for a weight, float32 `[out, in]`; `transposed`: of a layer that has it as `[in, out]`."""
    from fastgen import ops

    kept = weight.t() if transposed else weight
    return Weights(kept, ops.pack_weight(weight), int(ops.fingerprint(kept)), transposed)


def weights_of(layer: Any, transposed: bool = False) -> Weights | None:
    """What `multiply` takes for a layer's weight; None if memory is short. Only where `packed_weights.is_native`."""
    found = packed_weights.copy_and_state(layer, transposed)
    if found is None:
        return None
    (packed, _), (dtype, shape, number) = found
    weight: Tensor = layer.weight
    return Weights(weight, packed, number, transposed) if (dtype, shape) == (weight.dtype, weight.shape) else None


def rows_of_a_kind(number: int) -> int:
    """Numbers of rows up to here share one timing with `number`."""
    return 1 << (number - 1).bit_length()
