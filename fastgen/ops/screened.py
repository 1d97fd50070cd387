"""Linear layers of which only each row's largest output is wanted, for greedy search."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.checks import check_codes, check_floats, check_width
from fastgen.ops.operator import define
from fastgen.ops.quantized import quantized_parts

LONGEST = 1e18  # with rows or weights longer than this, sums may overflow: screening then computes all


def screen_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight to a quarter of the bytes, which `screened_linear` reads in place of the weight.

    Args: weight: float32 `[width, size]`, finite.

    Returns:
        codes: int8 `[width, size]`; `scales`: float32 `[width]`: `weight` is about `codes * scales[:, None]`.
        errors: float32 `[width]`: an upper bound of the length of each row's remainder, which includes what rounding
            adds to a product. The products of an input of length n with a row of the weight and with the row's codes
            differ by at most n times this (Cauchy and Schwarz).
    """
    weight = weight.detach()
    width, size = weight.shape
    tiny = torch.finfo(torch.float32).tiny
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales, errors = weight.new_empty(width), weight.new_empty(width)
    # A sum of n products is off by n * 2^-24 of the product of the lengths at most (Higham 2002, equation 3.5), here
    # twice: once with the codes, once with the weight.
    rounding = (2 * size + 8) * 2.0**-24
    for part, rounded, scale in quantized_parts(weight):
        codes[part], scales[part] = rounded, scale
        # In double precision, whose squares don't overflow.
        left = torch.linalg.vector_norm(weight[part] - rounded * scale[:, None], dim=1, dtype=torch.float64)
        length = torch.linalg.vector_norm(weight[part], dim=1, dtype=torch.float64)
        bound = left * 1.00001 + (length + left) * rounding + tiny
        errors[part] = torch.where(length < LONGEST, bound, torch.inf)
    return codes, scales, errors


def screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`linear(rows, weight, bias)` of which only the largest output of each row is wanted: for greedy search.

    Products with the codes and their error bounds tell which outputs may be the largest; only these are computed with
    the weight itself. Natively, on the CPU, a quarter of the bytes is read, and with few rows reading takes the time.
    An exact form of screening for maximum inner products (bounds by lengths as in LEMP, Teflioudi et al. 2015,
    https://doi.org/10.1145/2723372.2747647).

    Args:
        rows: float32 `[..., size]`.
        weight: float32 `[width, size]`.
        codes, scales, errors: `screen_weight(weight)`.
        bias: float32 `[width]`, or None.

    Returns: float32 `[..., width]`: the outputs that may be the largest of their row, the largest always among them,
        and -inf for all others. Natively, they equal those of `skinny_linear` to the last digit. For a row with a NaN
        or an infinity, all outputs are computed.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _screened_linear(rows, weight, codes, scales, errors, bias)
    return output


def check_screened(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    if weight.dim() != 2 or weight.shape[1] != rows.shape[-1]:
        raise ValueError(f"weight must be [width, {rows.shape[-1]}], not of shape {list(weight.shape)}.")
    if codes.shape != weight.shape:
        raise ValueError(f"codes must be {list(weight.shape)}, not of shape {list(codes.shape)}.")
    check_codes(codes, rows)
    for name, tensor in (("scales", scales), ("errors", errors), ("bias", bias)):
        check_width(name, tensor, weight.shape[0])
    named = ("rows", rows), ("weight", weight), ("scales", scales), ("errors", errors), ("bias", bias)
    check_floats("rows are", rows, *named)


def reference_screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> Tensor:
    check_screened(rows, weight, codes, scales, errors, bias)
    about = F.linear(rows, codes.float()) * scales
    about = about if bias is None else about + bias
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64) * 1.000001
    norms = torch.where(norms < LONGEST, norms, torch.inf).float()
    tiny = 4 * (rows.shape[-1] + 1) * torch.finfo(torch.float32).tiny
    reach = norms * errors + about.abs() * 2.4e-7 + tiny
    lower = (about - reach).nan_to_num(nan=-torch.inf, posinf=torch.inf)
    is_behind = about + reach < lower.amax(-1, keepdim=True)  # false where one is NaN
    return F.linear(rows, weight, bias).masked_fill(is_behind, -torch.inf)


def fake_screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> Tensor:
    check_screened(rows, weight, codes, scales, errors, bias)
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


_screened_linear = define(
    "screened_linear",
    "(Tensor rows, Tensor weight, Tensor codes, Tensor scales, Tensor errors, Tensor? bias) -> Tensor",
    reference_screened_linear,
    fake_screened_linear,
)
