"""Products with weights in fewer bits: where the user has chosen them, by `configure(weights=...)`, and in drafts.

With few rows a product takes as long as reading the weight: then only the weight is rounded, to 8 bits, a quarter of
the bytes, or to bfloat16, half of them. With more, arithmetic takes longer: then the rows are rounded too. In 8 bits
each row has a scale of its own (dynamic quantization, as in Jacob et al. 2018, https://arxiv.org/abs/1712.05877,
section 2, with zero points of 0), and torch multiplies integers, or `dynamic_quantized_linear` where torch can't; in
bfloat16 oneDNN multiplies, sums in float32, and rounds the sums. Where that loses too much, the weight stays in
float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen import ops, report
from fastgen.config import WORDS_OF_WEIGHTS
from fastgen.layers import packed_weights
from fastgen.layers.packed_weights import Rounded
from fastgen.layers.timing import Product
from fastgen.memory import arena
from fastgen.ops.quantized import LONGEST_SUM

# How far a product may be off, in lengths of vectors: what 8 bits lose is 0.5% to 2% on trained models.
LARGEST_ERROR = 0.05


# ---------------------------------------------------------------------------------------------- 8 bits
def multiply_rows(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with `weights` in 8 bits, a list of `Rounded`, and rows in float32."""
    codes, scales = [each.numbers for each in weights], [each.scales for each in weights]
    output: Tensor = torch.ops.fastgen.quantized_linear.default(rows, codes, scales, bias)
    return output


def multiply_codes(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with one weight in 8 bits, a list of one `Rounded`, and rows that are rounded to 8 bits."""
    (weight,) = weights
    output: Tensor
    if _are_integers_wrong():
        output = torch.ops.fastgen.dynamic_quantized_linear.default(rows, weight.numbers, weight.scales, bias)
        return output
    rounded, row_scales = torch.ops.fastgen.quantize_rows.default(rows.flatten(0, -2))
    products = torch._int_mm(rounded, weight.numbers.t())
    output = torch.ops.fastgen.dequantize.default(products, row_scales, weight.scales, bias)
    return output.unflatten(0, rows.shape[:-1])


def to_8_bits(weight: Tensor) -> Rounded:
    """A weight, float32 `[out, in]`, for either of these products."""
    return Rounded(*ops.quantize_weight(weight), {}, set())


@functools.cache
def _are_integers_wrong() -> bool:
    """Whether torch's product of integers is wrong, or there is none.

    Without VNNI or AMX oneDNN adds pairs of products in 16 bits, which is wrong for large numbers and does not say so.
    """
    like: dict[str, Any] = dict(dtype=torch.int8, device="cpu", generator=torch.Generator().manual_seed(0))
    for count in (1, 16, 33):
        a, b = (torch.randint(-127, 128, (n, 192), **like) for n in (count, 48))
        a[0], b[0], b[1] = 127, 127, -127
        try:
            with arena.outside():
                products = torch._int_mm(a, b.t())
        except (AttributeError, RuntimeError, NotImplementedError):
            return True
        if not torch.equal(products.double(), a.double() @ b.double().t()):
            return True
    return False


# ---------------------------------------------------------------------------------------------- bfloat16
def multiply_bfloat16(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with `weights` in bfloat16, a list of `Rounded`, and rows in float32."""
    output: Tensor = torch.ops.fastgen.skinny_linear.default(rows, [each.numbers for each in weights], bias)
    return output


def multiply_packed_bfloat16(rows: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """`linear` with one weight in bfloat16, packed, a list of one `Rounded`, and rows that are rounded to bfloat16."""
    (weight,) = weights
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows.bfloat16(), weight.numbers, None, "none", [], "").float()
    return output if bias is None else output.add_(bias)


def to_bfloat16(weight: Tensor) -> Rounded:
    """A weight, float32 `[out, in]`, for `multiply_bfloat16`."""
    return Rounded(weight.bfloat16().contiguous(), None, {}, set())


def to_packed_bfloat16(weight: Tensor) -> Rounded:
    """A weight, float32 `[out, in]`, for `multiply_packed_bfloat16`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous())
    return Rounded(packed, None, {}, set())


def _wrong_bfloat16() -> str | None:
    """Why oneDNN's product in bfloat16, which is private to torch, is of no use, or None.

    Processors without instructions for bfloat16 convert to float32, which is no faster than float32.
    """
    has = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if not any(is_supported is not None and is_supported() for is_supported in has):
        return "this processor multiplies no bfloat16"
    like: dict[str, Any] = dict(dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0))
    rows, weight = (torch.randn(n, 192, **like).bfloat16().float() for n in (33, 48))
    try:
        with arena.outside():
            found = multiply_packed_bfloat16(rows, [to_packed_bfloat16(weight)], None)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"this torch multiplies no bfloat16 here ({(str(error).splitlines() or [''])[0][:100]})"
    off = float((found - F.linear(rows, weight)).abs().max())
    return None if off < 0.5 else f"torch's product in bfloat16 is wrong by {off:.1e}"


# ---------------------------------------------------------------------------------------------- both
@dataclass(frozen=True)
class Way:
    """A product with weights in fewer bits, and how they are made."""

    name: str  # of the copies
    product: Product
    round: Callable[[Tensor], Rounded]  # of a weight `[out, in]`
    bits: int
    several: bool  # whether the product takes several weights

    def prepare(self, weight: Tensor) -> list[Rounded]:
        return [self.round(weight)]


# For few rows and for many, by the name that the user gives to `configure`.
WAYS = {
    "int8": (
        Way("int8", multiply_rows, to_8_bits, 8, several=True),
        Way("int8", multiply_codes, to_8_bits, 8, several=False),
    ),
    "bf16": (
        Way("bfloat16", multiply_bfloat16, to_bfloat16, 16, several=True),
        Way("packed bfloat16", multiply_packed_bfloat16, to_packed_bfloat16, 16, several=False),
    ),
}
ONE_AT_A_TIME = {way.product for ways in WAYS.values() for way in ways if not way.several}


@functools.cache
def unavailable(product: Product) -> str | None:
    """Why a product can't be used here, or None."""
    if not ops.is_native(torch.device("cpu")):
        return "products with weights in fewer bits need the native operators"
    return _wrong_bfloat16() if product is multiply_packed_bfloat16 else None


def is_near(layer: nn.Module, copy: Rounded, product: Product, rows: Tensor, transposed: bool) -> bool:
    """Whether the layer's product with its weight in fewer bits is near that in float32, on these rows.

    Tried once for each copy: the first rows that the layer reads decide.
    """
    errors = copy.errors
    if product not in errors:
        with arena.outside():
            errors[product] = _error(layer, copy, product, rows, transposed)
    return errors[product] <= LARGEST_ERROR


def _error(layer: Any, copy: Rounded, product: Product, rows: Tensor, transposed: bool) -> float:
    if product is multiply_codes and rows.shape[-1] > LONGEST_SUM:
        return math.inf  # a sum of integers might be
    weight = layer.weight.t() if transposed else layer.weight
    expected = F.linear(rows, weight, layer.bias).double()
    found = product(rows, [copy], layer.bias).double()
    length = float(torch.linalg.vector_norm(expected))
    off = float(torch.linalg.vector_norm(found - expected))
    if off == 0:
        return 0.0
    return off / length if length > 0 and math.isfinite(off) else math.inf


def note_chosen(copy: Rounded) -> None:
    """Note that the user has chosen fewer bits for this copy's layer, so that `summary` speaks of it."""
    copy.chosen_by.add("user")


def drop_unchosen(layers: Iterable[nn.Module]) -> None:
    """Drop the copies of these layers' weights that the user has not chosen."""
    packed_weights.drop_rounded(layers, lambda copy: not copy.chosen_by)


@report.provides("quantized")
def summary() -> str:
    """What became of layers whose weights the user wants in fewer bits; "" before the first."""
    tried = [each for each in packed_weights.all_rounded() if each[2].errors and each[2].chosen_by]
    return "; ".join(
        _summary(word, found)
        for bits, word in WORDS_OF_WEIGHTS.items()
        if (found := [each[1:] for each in tried if each[0] in {way.name for way in WAYS[bits]}])
    )


def _summary(word: str, tried: list[tuple[Any, Rounded]]) -> str:
    errors: dict[nn.Module, list[float]] = {}
    for layer, copy in tried:
        errors.setdefault(layer, []).extend(copy.errors.values())
    used = sum(min(each) <= LARGEST_ERROR for each in errors.values())
    text = f"{used} linear layers in {word}, so outputs may differ from the host's"
    if far := [(max(each), layer) for layer, each in errors.items() if not max(each) <= LARGEST_ERROR]:
        error, layer = max(far, key=lambda pair: pair[0])
        shape: Any = layer.weight.shape
        named, by = " x ".join(map(str, shape)), f"{error:.0%}" if math.isfinite(error) else "infinity"
        text += f"; products of {len(far)} stay in float32, where {word} would lose too much (up to {by}, {named})"
    return text
