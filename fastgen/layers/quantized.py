"""Products with weights in 8 bits: where the user has chosen them, by `configure(weights="int8")`, and in drafts.

With few rows a product takes as long as reading the weight: then only the weight is in 8 bits, a quarter of the bytes.
With more, arithmetic takes longer: then the rows are rounded to 8 bits too, each with a scale of its own, and torch
multiplies integers (dynamic quantization, as in Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 2, with
zero points of 0). Where that loses too much, the weight stays in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen import ops, report
from fastgen.layers import packed_weights
from fastgen.layers.packed_weights import Quantized
from fastgen.layers.timing import Product
from fastgen.memory import arena

# How far a product may be off, in lengths of vectors: what 8 bits lose is 0.5% to 2% on trained models.
LARGEST_ERROR = 0.05


def multiply_rows(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with `weights` in 8 bits, a list of `Quantized`, and rows in float32."""
    codes, scales = [each.codes for each in weights], [each.scales for each in weights]
    output: Tensor = torch.ops.fastgen.quantized_linear.default(rows, codes, scales, bias)
    return output


def multiply_codes(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with one weight in 8 bits, a list of one `Quantized`, and rows that are rounded to 8 bits."""
    (weight,) = weights
    rounded, row_scales = torch.ops.fastgen.quantize_rows.default(rows.flatten(0, -2))
    products = torch._int_mm(rounded, weight.codes.t())
    output: Tensor = torch.ops.fastgen.dequantize.default(products, row_scales, weight.scales, bias)
    return output.unflatten(0, rows.shape[:-1])


def prepare(weight: Tensor) -> list[Quantized]:
    """A weight, float32 `[out, in]`, for either product."""
    return [Quantized.of(weight)]


@functools.cache
def unavailable(product: Product) -> str | None:
    """Why a product can't be used here, or None."""
    if not ops.is_native(torch.device("cpu")):
        return "products in 8 bits need the native operators"
    return None if product is multiply_rows else _wrong_integers()


def _wrong_integers() -> str | None:
    """Why torch's product of integers is of no use, or None.

    Without VNNI or AMX oneDNN adds pairs of products in 16 bits, which is wrong for large numbers and does not say so.
    """
    like: dict[str, Any] = dict(dtype=torch.int8, device="cpu", generator=torch.Generator().manual_seed(0))
    for count in (1, 16, 33):
        a, b = (torch.randint(-127, 128, (n, 192), **like) for n in (count, 48))
        a[0], b[0], b[1] = 127, 127, -127
        try:
            with arena.outside():
                products = torch._int_mm(a, b.t())
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            return f"this torch multiplies no integers ({(str(error).splitlines() or [''])[0][:100]})"
        if not torch.equal(products.double(), a.double() @ b.double().t()):
            return "torch multiplies integers wrongly on this processor, which has neither VNNI nor AMX"
    return None


def is_near(layer: nn.Module, copy: Quantized, product: Product, rows: Tensor, transposed: bool) -> bool:
    """Whether the layer's product with its weight in 8 bits is near that in float32, on these rows.

    Tried once for each copy: the first rows that the layer reads decide.
    """
    errors = copy.errors
    if product not in errors:
        with arena.outside():
            errors[product] = _error(layer, copy, product, rows, transposed)
    return errors[product] <= LARGEST_ERROR


def _error(layer: Any, copy: Quantized, product: Product, rows: Tensor, transposed: bool) -> float:
    weight = layer.weight.t() if transposed else layer.weight
    expected = F.linear(rows, weight, layer.bias).double()
    found = product(rows, [copy], layer.bias).double()
    length = float(torch.linalg.vector_norm(expected))
    off = float(torch.linalg.vector_norm(found - expected))
    return 0.0 if off == 0 else off / length if length > 0 else float("inf")


def note_chosen(copy: Quantized) -> None:
    """Note that the user has chosen 8 bits for this copy's layer, so that `summary` speaks of it."""
    copy.chosen_by.add("user")


def drop_unchosen(layers: Iterable[nn.Module]) -> None:
    """Drop the copies of these layers' weights that the user has not chosen."""
    packed_weights.drop_quantized(layers, lambda copy: not copy.chosen_by)


@report.provides("quantized")
def summary() -> str:
    """What became of layers whose weights the user wants in 8 bits; "" before the first."""
    copies = packed_weights.all_quantized()
    tried = [(layer, list(copy.errors.values())) for layer, copy in copies if copy.errors and copy.chosen_by]
    if not tried:
        return ""
    used = sum(min(errors) <= LARGEST_ERROR for _, errors in tried)
    text = f"{used} linear layers, so outputs may differ from the host's"
    if far := [(max(errors), layer) for layer, errors in tried if not max(errors) <= LARGEST_ERROR]:
        error, layer = max(far, key=lambda pair: pair[0])
        named = " x ".join(map(str, layer.weight.shape))
        text += f"; products of {len(far)} stay in float32, where 8 bits lose too much (up to {error:.0%}, {named})"
    return text
