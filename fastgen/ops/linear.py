"""Linear layers for a few rows and large weights, packed or as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.checks import check_floats, check_width
from fastgen.ops.operator import define

PANEL = 64  # outputs side by side in a packed weight


def skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Multiply a few rows by several weights at once, such as the query, key and value projections.

    A decode step of a few sentences is as fast as weights come from memory (roofline: Williams et al. 2009,
    https://doi.org/10.1145/1498765.1498785). Natively, on the CPU, weights are read once, in place, and neither copied
    nor packed. This pays up to 12 rows or so: with more, arithmetic takes longer than reading, and libraries that pack
    are faster.

    Args:
        rows: float32 `[..., size]`.
        weights: float32, float16 or bfloat16 `[width_i, size]` each; 16 bits are converted to float32, exactly.
        bias: float32 `[width]`, or None; `width` is the sum of the weights' widths.

    Returns: float32 `[..., width]`: `linear(rows, torch.cat(weights), bias)`; no gradient passes through it. Natively,
        each row is the same to the last digit whatever the others are, and however many.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _skinny_linear(rows, weights, bias)
    return output


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of a weight for `packed_linear`, in panels of 64 outputs.

    Args: weight: float32 `[width, size]`, of any strides.

    Returns: float32 `[ceil(width / 64), size, 64]`, zeros beyond the last output.
    """
    weight = weight.detach()
    width, size = weight.shape
    whole = width // PANEL
    packed = weight.new_zeros(-(-width // PANEL), size, PANEL)
    packed[:whole] = weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if width % PANEL:
        packed[-1, :, : width % PANEL] = weight[whole * PANEL :].t()
    return packed


def packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None = None) -> Tensor:
    """`linear(rows, weight, bias)` with a weight packed by `pack_weight`.

    Natively, on the CPU, the numbers of one loop step lie side by side, in the order of use, as in the inner kernel of
    Goto and van de Geijn 2008 (https://doi.org/10.1145/1356052.1356053, section 5), so that a few rows run at the speed
    of the memory or the processor; libraries reach that only with many rows. Plain torch unpacks the weight each time.

    Args:
        rows: float32 `[..., size]`.
        packed: float32 `[ceil(width / 64), size, 64]`.
        width: number of outputs of the weight.
        bias: float32 `[width]`, or None.

    Returns: float32 `[..., width]`; no gradient passes through it. Natively, each row is the same to the last digit
        whatever the others are, and however many.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _packed_linear(rows, packed, width, bias)
    return output


def check_skinny(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    if not weights:
        raise ValueError("weights must be one tensor or more.")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != rows.shape[-1]:
            raise ValueError(f"weights must be [width, {rows.shape[-1]}], not of shape {list(weight.shape)}.")
    width = sum(weight.shape[0] for weight in weights)
    check_width("bias", bias, width)
    check_floats("rows are", rows, ("rows", rows), ("bias", bias))
    check_floats("rows are", rows, *(("weights", weight) for weight in weights), or_half=True)


def check_packed(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    shape = (-(-width // PANEL), rows.shape[-1], PANEL)
    if width < 0 or packed.shape != shape:
        raise ValueError(f"packed must be {list(shape)}, not of shape {list(packed.shape)}.")
    check_width("bias", bias, width)
    check_floats("rows are", rows, ("rows", rows), ("packed", packed), ("bias", bias))


def reference_skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    check_skinny(rows, weights, bias)
    output = torch.cat([F.linear(rows, weight.float()) for weight in weights], -1)
    return output if bias is None else output + bias


def reference_packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> Tensor:
    check_packed(rows, packed, width, bias)
    return F.linear(rows, packed.transpose(1, 2).flatten(0, 1)[:width], bias)


def fake_skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    check_skinny(rows, weights, bias)
    return rows.new_empty(*rows.shape[:-1], sum(weight.shape[0] for weight in weights))


def fake_packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> Tensor:
    check_packed(rows, packed, width, bias)
    return rows.new_empty(*rows.shape[:-1], width)


_skinny_linear = define(
    "skinny_linear",
    "(Tensor rows, Tensor[] weights, Tensor? bias) -> Tensor",
    reference_skinny_linear,
    fake_skinny_linear,
)
_packed_linear = define(
    "packed_linear",
    "(Tensor rows, Tensor packed, SymInt width, Tensor? bias) -> Tensor",
    reference_packed_linear,
    fake_packed_linear,
)
