"""Linear layers with weights in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.checks import check_codes, check_floats, check_width
from fastgen.ops.operator import define

_ROWS = 1024  # of a weight, at a time: temporaries stay small
LONGEST_SUM = (2**31 - 1) // (127 * 128)  # of products of codes, in 32 bits: of rows up to 127, of weights to -128


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 bits, symmetrically, with one scale for each output.

    Args: weight: float32 `[width, size]`, finite, of any strides.

    Returns: codes, int8 `[width, size]`, and scales, float32 `[width]`: `weight` is about `codes * scales[:, None]`,
        off by half a scale at most. A scale is the largest number of the row over 127, and no less than the smallest
        normal number.
    """
    weight = weight.detach()
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = weight.new_empty(len(weight))
    for part, rounded, scale in quantized_parts(weight):
        codes[part], scales[part] = rounded, scale
    return codes, scales


def quantized_parts(weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of a weight's rows, `[n, size]`: where they are, their codes as floats `[n, size]`, their scales `[n]`."""
    for start in range(0, len(weight), _ROWS):
        part = slice(start, start + _ROWS)
        scales = _scales_of(weight[part])
        yield part, (weight[part] / scales[:, None]).round_(), scales


def _scales_of(rows: Tensor) -> Tensor:
    """The largest number of each row, `[n, size]`, over 127, and no less than the smallest normal number."""
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    return (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)


def quantized_linear(
    rows: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """Multiply a few rows by several weights at once, each in 8 bits, such as query, key and value projections.

    The rows stay in float32, and so do the sums. With few rows a product takes as long as reading the weight, and codes
    are a quarter of the bytes.

    Args:
        rows: float32 `[..., size]`.
        codes, scales: of each weight, `quantize_weight(weight)`: int8 `[width_i, size]` and float32 `[width_i]`.
        bias: float32 `[width]`, or None; `width` is the sum of the weights' widths.

    Returns: float32 `[..., width]`: `linear(rows, torch.cat([codes * scales[:, None]]), bias)`; no gradient passes
        through it. Natively, each row is the same to the last digit whatever the others are, and however many.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _quantized_linear(rows, codes, scales, bias)
    return output


def check_quantized(rows: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    if not codes:
        raise ValueError("codes must be one tensor or more.")
    if len(codes) != len(scales):
        raise ValueError(f"scales must be as many as codes: {len(codes)}, not {len(scales)}.")
    for each, scale in zip(codes, scales, strict=True):
        if each.dim() != 2 or each.shape[1] != rows.shape[-1]:
            raise ValueError(f"codes must be [width, {rows.shape[-1]}], not of shape {list(each.shape)}.")
        check_codes(each, rows)
        check_width("scales", scale, len(each))
        check_floats("rows are", rows, ("scales", scale))
    check_width("bias", bias, sum(len(each) for each in codes))
    check_floats("rows are", rows, ("rows", rows), ("bias", bias))


def reference_quantized_linear(
    rows: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    check_quantized(rows, codes, scales, bias)
    parts = [F.linear(rows, each.float()) * scale for each, scale in zip(codes, scales, strict=True)]
    output = torch.cat(parts, -1)
    return output if bias is None else output + bias


def fake_quantized_linear(
    rows: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    check_quantized(rows, codes, scales, bias)
    return rows.new_empty(*rows.shape[:-1], sum(len(each) for each in codes))


def dynamic_quantized_linear(rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply many rows by a weight in 8 bits; the rows are rounded to 8 bits as well, each with a scale of its own.

    Products of integers are summed exactly, in 32 bits. With many rows arithmetic takes longest: natively, one
    instruction multiplies twice as many integers of 16 bits as floats. Processors with VNNI or AMX have faster ones, of
    8 bits, which torch's product of integers uses: `quantize_rows`, `torch._int_mm` and `dequantize` yield the same.

    Args:
        rows: float32 `[..., size]`.
        codes, scales: `quantize_weight(weight)`: int8 `[width, size]` and float32 `[width]`.
        bias: float32 `[width]`, or None.

    Returns: float32 `[..., width]`: `dequantize(row_codes @ codes.T, row_scales, scales, bias)`, where
        `row_codes, row_scales = quantize_rows(rows)` (dynamic quantization: Jacob et al. 2018,
        https://arxiv.org/abs/1712.05877, section 2, with zero points of 0); no gradient passes through it.

    Raises:
        ValueError: for shapes or devices other than these, and for a size above 132,104, whose sums need more bits.
        TypeError: for other dtypes.
    """
    output: Tensor = _dynamic_quantized_linear(rows, codes, scales, bias)
    return output


def check_dynamic(rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    check_quantized(rows, [codes], [scales], bias)
    if codes.shape[1] > LONGEST_SUM:
        raise ValueError(f"codes must be [width, size] with a size of at most {LONGEST_SUM}, not {codes.shape[1]}.")


def reference_dynamic_quantized_linear(rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    check_dynamic(rows, codes, scales, bias)
    row_codes, row_scales = reference_quantize_rows(rows.flatten(0, -2) if rows.dim() > 1 else rows[None])
    products = (row_codes.double() @ codes.double().t()).int()  # exact: below 2**53
    output = reference_dequantize(products, row_scales, scales, bias)
    return output.view(*rows.shape[:-1], len(codes))


def fake_dynamic_quantized_linear(rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    check_dynamic(rows, codes, scales, bias)
    return rows.new_empty(*rows.shape[:-1], len(codes))


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits, symmetrically, with a scale of its own.

    Args: rows: float32 `[count, size]`.

    Returns: codes, int8 `[count, size]`, -127 to 127, and scales, float32 `[count]`, as `quantize_weight` defines them;
        the scale of a row with a NaN or an infinity is NaN.

    Raises:
        ValueError: for other shapes.
        TypeError: for other dtypes.
    """
    codes, scales = _quantize_rows(rows)
    return codes, scales


def dequantize(products: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`products * row_scales[:, None] * scales + bias`: what a product of codes, rows by weight, stands for.

    Args:
        products: int32 `[count, width]`.
        row_scales: float32 `[count]`.
        scales: float32 `[width]`.
        bias: float32 `[width]`, or None.

    Returns: float32 `[count, width]`.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _dequantize(products, row_scales, scales, bias)
    return output


def check_rows(rows: Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"rows must be [count, size], not of shape {list(rows.shape)}.")
    check_floats("rows are", rows, ("rows", rows))


def check_products(products: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    if products.dim() != 2:
        raise ValueError(f"products must be [count, width], not of shape {list(products.shape)}.")
    if products.dtype != torch.int32:
        raise TypeError(f"products must be int32, not {products.dtype}.")
    check_width("row_scales", row_scales, len(products))
    check_width("scales", scales, products.shape[1])
    check_width("bias", bias, products.shape[1])
    named = ("row_scales", row_scales), ("scales", scales), ("bias", bias)
    check_floats("products are", products, *named)


def reference_quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    check_rows(rows)
    scales = _scales_of(rows)
    is_finite = rows.isfinite().all(1)
    codes = (rows / scales[:, None]).round().masked_fill(~is_finite[:, None], 0.0)
    return codes.to(torch.int8), scales.masked_fill(~is_finite, torch.nan)


def reference_dequantize(products: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    check_products(products, row_scales, scales, bias)
    output = products.float() * row_scales[:, None] * scales
    return output if bias is None else output + bias


def fake_quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    check_rows(rows)
    return rows.new_empty(rows.shape, dtype=torch.int8), rows.new_empty(len(rows))


def fake_dequantize(products: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    check_products(products, row_scales, scales, bias)
    return row_scales.new_empty(products.shape)


_quantize_rows = define(
    "quantize_rows", "(Tensor rows) -> (Tensor, Tensor)", reference_quantize_rows, fake_quantize_rows
)
_dequantize = define(
    "dequantize",
    "(Tensor products, Tensor row_scales, Tensor scales, Tensor? bias) -> Tensor",
    reference_dequantize,
    fake_dequantize,
)
_quantized_linear = define(
    "quantized_linear",
    "(Tensor rows, Tensor[] codes, Tensor[] scales, Tensor? bias) -> Tensor",
    reference_quantized_linear,
    fake_quantized_linear,
)
_dynamic_quantized_linear = define(
    "dynamic_quantized_linear",
    "(Tensor rows, Tensor codes, Tensor scales, Tensor? bias) -> Tensor",
    reference_dynamic_quantized_linear,
    fake_dynamic_quantized_linear,
)
