"""quantize_weight; quantized_linear and dynamic_quantized_linear against float64 with the same codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES
from torch import Tensor

from fastgen import ops
from fastgen.ops.quantized import LONGEST_SUM

CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.integers(1, 18),
        "size": st.one_of(st.integers(1, 70), st.sampled_from([96, 512, 1000])),
        "widths": st.lists(st.one_of(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=4),
        "bias": st.booleans(),
        "threads": st.sampled_from([1, 2]),
    }
)


def inputs(case: dict[str, Any]) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(case["rows"], case["size"], generator=generator)
    weights = [ops.quantize_weight(torch.randn(width, case["size"], generator=generator)) for width in case["widths"]]
    bias = torch.randn(sum(case["widths"]), generator=generator) if case["bias"] else None
    return rows, [codes for codes, _ in weights], [scales for _, scales in weights], bias


def exact(rows: Tensor, codes: list[Tensor], scales: list[Tensor], bias: Tensor | None) -> Tensor:
    weights = [each.double() * scale.double()[:, None] for each, scale in zip(codes, scales, strict=True)]
    output = rows.double() @ torch.cat(weights).t()
    return output if bias is None else output + bias.double()


@CASES
@given(case=cases)
@example(case=dict(seed=0, rows=1, size=1, widths=[1], bias=True, threads=1))
@example(case=dict(seed=0, rows=13, size=67, widths=[5, 0, 3], bias=True, threads=2))
@example(case=dict(seed=0, rows=7, size=600, widths=[0], bias=False, threads=1))
def test_product(operators: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    arguments = inputs(case)
    output = operators.quantized_linear(*arguments)
    assert output.is_contiguous() and output.dtype == torch.float32
    largest = float(max(1.0, case["size"] ** 0.5))
    torch.testing.assert_close(output.double(), exact(*arguments), rtol=1e-5, atol=4e-6 * largest)


def test_a_row_is_the_same_whatever_the_others_are(native: Any, threads: Any) -> None:
    rows, codes, scales, bias = inputs(dict(seed=1, rows=17, size=530, widths=[301, 9], bias=True))
    assert bias is not None
    threads(1)
    together = native.quantized_linear(rows, codes, scales, bias)
    threads(2)
    for count in range(1, 18):
        assert torch.equal(native.quantized_linear(rows[:count], codes, scales, bias), together[:count])
    assert torch.equal(native.quantized_linear(rows, codes[1:], scales[1:], bias[301:]), together[:, 301:])


def test_codes_and_scales_that_are_not_dense(operators: Any) -> None:
    rows, codes, scales, bias = inputs(dict(seed=2, rows=3, size=33, widths=[40], bias=True))
    apart = torch.full((41, 35), 99, dtype=torch.int8)
    apart[:40, :33] = codes[0]
    found = operators.quantized_linear(rows, [apart[:40, :33]], [scales[0].repeat_interleave(2)[::2]], bias)
    assert torch.equal(found, operators.quantized_linear(rows, codes, scales, bias))


def test_shapes(operators: Any) -> None:
    codes, scales = ops.quantize_weight(torch.ones(5, 4))
    assert operators.quantized_linear(torch.ones(2, 3, 4), [codes], [scales], None).shape == (2, 3, 5)
    assert operators.quantized_linear(torch.ones(0, 4), [codes, codes], [scales, scales], None).shape == (0, 10)
    output = operators.quantized_linear(torch.ones(2, 0), [codes[:, :0]], [scales], torch.ones(5))
    assert torch.equal(output, torch.ones(2, 5))


def test_infinities_and_nan(operators: Any) -> None:
    rows = torch.ones(3, 40)
    rows[1, 3], rows[2, 3] = math.inf, math.nan
    codes, scales = ops.quantize_weight(torch.ones(6, 40))
    output = operators.quantized_linear(rows, [codes], [scales], None)
    torch.testing.assert_close(output[0], torch.full((6,), 40.0))
    assert (output[1] == math.inf).all() and output[2].isnan().all()


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (1, 1), (1025, 3), (2, 3000)])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 1e30])
def test_quantize_weight(shape: tuple[int, int], scale: float) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale
    codes, scales = ops.quantize_weight(weight.t().contiguous().t())  # of any strides
    assert codes.dtype == torch.int8 and codes.shape == shape and codes.is_contiguous() and scales.shape == shape[:1]
    assert codes.min() >= -127 if codes.numel() else True
    off = (codes.double() * scales.double()[:, None] - weight.double()).abs()
    assert (off <= 0.500001 * scales.double()[:, None]).all()


ROWS, CODES, SCALES = torch.zeros(2, 4), torch.zeros(5, 4, dtype=torch.int8), torch.zeros(5)


# Arguments of both products, of rows that are quantised on the way and of others.
@pytest.mark.parametrize(
    ("rows", "codes", "scales", "bias", "error", "message"),
    [
        (torch.tensor(1.0), CODES, SCALES, None, ValueError, r"rows must be \[..., size\], not of shape \[\]"),
        (ROWS, CODES.t(), SCALES, None, ValueError, r"codes must be \[width, 4\], not of shape \[4, 5\]"),
        (ROWS, CODES, SCALES[:4], None, ValueError, r"scales must be \[5\], not of shape \[4\]"),
        (ROWS, CODES, SCALES, torch.zeros(4), ValueError, r"bias must be \[5\], not of shape \[4\]"),
        (ROWS, CODES.to("meta"), SCALES, None, ValueError, "rows are on cpu and codes on meta"),
        (ROWS, CODES.float(), SCALES, None, TypeError, r"codes must be int8, not .*(float|float32)"),
        (ROWS, CODES, SCALES.half(), None, TypeError, r"scales must be float32, not .*([Hh]alf|float16)"),
        (ROWS.double(), CODES, SCALES, None, TypeError, r"rows must be float32, not .*(double|float64)"),
        (ROWS, CODES, SCALES, torch.zeros(5).half(), TypeError, r"bias must be float32, not .*([Hh]alf|float16)"),
    ],
)
def test_bad_arguments(
    operators: Any, rows: Tensor, codes: Tensor, scales: Tensor, bias: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.quantized_linear(rows, [codes], [scales], bias)
    with pytest.raises(error, match=message):
        operators.dynamic_quantized_linear(rows, codes, scales, bias)


def test_bad_numbers_of_arguments(operators: Any) -> None:
    with pytest.raises(ValueError, match=r"codes must be one tensor or more"):
        operators.quantized_linear(ROWS, [], [], None)
    with pytest.raises(ValueError, match=r"scales must be as many as codes: 1, not 0"):
        operators.quantized_linear(ROWS, [CODES], [], None)


def test_sums_that_would_be_too_long(operators: Any) -> None:
    size = LONGEST_SUM + 1
    what = rf"codes must be \[width, size\] with a size of at most {LONGEST_SUM}, not {size}"
    with pytest.raises(ValueError, match=what):
        operators.dynamic_quantized_linear(
            torch.zeros(1, size), torch.zeros(1, size, dtype=torch.int8), SCALES[:1], None
        )


@CASES
@given(
    count=st.integers(0, 70),
    size=st.one_of(st.integers(0, 70), st.just(1000)),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_quantize_rows(operators: Any, count: int, size: int, scale: float, seed: int) -> None:
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * scale
    codes, scales = operators.quantize_rows(rows)
    expected, expected_scales = ops.quantize_weight(rows)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected)


def test_rows_that_are_not_finite(operators: Any) -> None:
    rows = torch.ones(4, 37)
    rows[1, 36], rows[2, 0], rows[3, 5] = math.inf, math.nan, -math.inf
    codes, scales = operators.quantize_rows(rows)
    assert (codes[0] == 127).all() and scales[0] == rows[0, 0] / 127
    assert scales[1:].isnan().all()
    assert operators.dequantize(codes[1:].int(), scales[1:], torch.ones(37), None).isnan().all()


@CASES
@given(
    count=st.integers(0, 40),
    width=st.one_of(st.integers(0, 70), st.just(5000)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dequantize(operators: Any, count: int, width: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    products = torch.randint(-(2**24), 2**24, (count, width), generator=generator, dtype=torch.int32)
    row_scales, scales = torch.rand(count, generator=generator), torch.rand(width, generator=generator)
    added = torch.randn(width, generator=generator) if bias else None
    output = operators.dequantize(products, row_scales, scales, added)
    exact = products.double() * row_scales.double()[:, None] * scales.double() + (
        0.0 if added is None else added.double()
    )
    torch.testing.assert_close(output.double(), exact, rtol=1e-6, atol=1e-6)
    assert output.dtype == torch.float32 and output.shape == (count, width)


@pytest.mark.parametrize(
    ("products", "row_scales", "scales", "bias", "error", "message"),
    [
        (CODES[0].int(), SCALES, SCALES, None, ValueError, r"products must be \[count, width\], not of shape \[4\]"),
        (CODES, SCALES, SCALES[:4], None, TypeError, r"products must be int32, not .*(char|int8)"),
        (CODES.int(), SCALES[:4], SCALES[:4], None, ValueError, r"row_scales must be \[5\], not of shape \[4\]"),
        (CODES.int(), SCALES, SCALES, None, ValueError, r"scales must be \[4\], not of shape \[5\]"),
        (CODES.int(), SCALES, SCALES[:4], SCALES, ValueError, r"bias must be \[4\], not of shape \[5\]"),
        (
            CODES.int(),
            SCALES.half(),
            SCALES[:4],
            None,
            TypeError,
            r"row_scales must be float32, not .*([Hh]alf|float16)",
        ),
    ],
)
def test_bad_arguments_of_dequantize(
    operators: Any, products: Any, row_scales: Any, scales: Any, bias: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.dequantize(products, row_scales, scales, bias)


def test_bad_arguments_of_quantize_rows(operators: Any) -> None:
    with pytest.raises(ValueError, match=r"rows must be \[count, size\], not of shape \[4\]"):
        operators.quantize_rows(torch.zeros(4))
    with pytest.raises(TypeError, match=r"rows must be float32, not .*([Dd]ouble|float64)"):
        operators.quantize_rows(torch.zeros(4, 4).double())


# ---------------------------------------------------------------------------------------------- rows in 8 bits as well
@CASES
@given(case=cases, count=st.integers(1, 60))
@example(case=dict(seed=0, rows=1, size=1, widths=[1], bias=True, threads=1), count=1)
@example(case=dict(seed=0, rows=1, size=4100, widths=[9], bias=True, threads=2), count=40)
def test_dynamic_product(operators: Any, threads: Any, case: dict[str, Any], count: int) -> None:
    """The products of integers, exactly; then each is rounded to float32, at most three times."""
    threads(case["threads"])
    _, codes, scales, _ = inputs(case)
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(count, case["size"], generator=generator)
    bias = torch.randn(len(codes[0]), generator=generator) if case["bias"] else None
    output = operators.dynamic_quantized_linear(rows, codes[0], scales[0], bias)
    assert output.is_contiguous() and output.dtype == torch.float32
    row_codes, row_scales = ops.quantize_weight(rows)
    exact = (row_codes.double() @ codes[0].double().t()) * row_scales.double()[:, None] * scales[0].double()
    added = 0.0 if bias is None else bias.double()
    bound = 3e-7 * (exact.abs() + (exact + added).abs()) + 1e-37
    assert ((output.double() - exact - added).abs() <= bound).all()


def test_dynamic_products_of_the_largest_codes_are_exact(operators: Any) -> None:
    """All pairs of products have the largest sum there is, which 16 bits do not hold."""
    for size in (1, 16, 31, 500, LONGEST_SUM):
        for code in (-127, -128):
            codes, scales = torch.full((5, size), code, dtype=torch.int8), torch.ones(5)
            output = operators.dynamic_quantized_linear(torch.full((4, size), 127.0), codes, scales, None)
            assert (output == float(torch.tensor(127.0 * code * size))).all()


def test_dynamic_rows_are_the_same_whatever_the_others_are(native: Any, threads: Any) -> None:
    rows, (codes,), (scales,), bias = inputs(dict(seed=1, rows=18, size=530, widths=[301], bias=True))
    threads(1)
    together = native.dynamic_quantized_linear(rows, codes, scales, bias)
    threads(2)
    for count in range(1, 19):
        assert torch.equal(native.dynamic_quantized_linear(rows[:count], codes, scales, bias), together[:count])


def test_dynamic_shapes_and_strides(operators: Any) -> None:
    codes, scales = ops.quantize_weight(torch.ones(5, 4))
    assert operators.dynamic_quantized_linear(torch.ones(2, 3, 4), codes, scales, None).shape == (2, 3, 5)
    assert operators.dynamic_quantized_linear(torch.ones(4), codes, scales, None).shape == (5,)
    assert operators.dynamic_quantized_linear(torch.ones(0, 4), codes, scales, None).shape == (0, 5)
    assert operators.dynamic_quantized_linear(torch.ones(2, 4), codes[:0], scales[:0], None).shape == (2, 0)
    output = operators.dynamic_quantized_linear(torch.ones(2, 0), codes[:, :0], scales, torch.ones(5))
    assert torch.equal(output, torch.ones(2, 5))
    rows, apart = torch.randn(3, 33), torch.full((41, 35), 99, dtype=torch.int8)
    apart[:40, :33], scales = ops.quantize_weight(torch.randn(40, 33))
    found = operators.dynamic_quantized_linear(rows.t().contiguous().t(), apart[:40, :33], scales, None)
    assert torch.equal(found, operators.dynamic_quantized_linear(rows, apart[:40, :33].contiguous(), scales, None))


def test_dynamic_rows_that_are_not_finite(operators: Any) -> None:
    rows = torch.ones(4, 37)
    rows[1, 36], rows[2, 0], rows[3, 5] = math.inf, math.nan, -math.inf
    output = operators.dynamic_quantized_linear(rows, *ops.quantize_weight(torch.ones(6, 37)), None)
    torch.testing.assert_close(output[0], torch.full((6,), 37.0))
    assert output[1:].isnan().all()
