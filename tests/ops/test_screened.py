"""screened_linear: the largest output of each row is that of the product itself, whatever the codes lose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES
from torch import Tensor
from torch.nn import functional as F

from fastgen import ops

CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.integers(1, 14),
        "size": st.one_of(st.integers(1, 70), st.sampled_from([96, 512])),
        "width": st.one_of(st.integers(1, 9), st.integers(1, 3000)),
        "bias": st.booleans(),
        "spread": st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 30.0]),  # of the lengths of the weight's rows
        "threads": st.sampled_from([1, 2]),
    }
)


def inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(case["rows"], case["size"], generator=generator)
    weight = torch.randn(1, case["size"], generator=generator)
    # Rows of the weight that hardly differ are hardest to tell apart.
    weight = weight + case["spread"] * torch.randn(case["width"], case["size"], generator=generator)
    return rows, weight, torch.randn(case["width"], generator=generator) * case["spread"] if case["bias"] else None


@CASES
@given(case=cases)
@example(case=dict(seed=0, rows=1, size=1, width=1, bias=True, spread=1.0, threads=1))
@example(case=dict(seed=0, rows=13, size=67, width=2999, bias=True, spread=1e-3, threads=2))
def test_the_largest(operators: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    rows, weight, bias = inputs(case)
    output = operators.screened_linear(rows, weight, *ops.screen_weight(weight), bias)
    whole = operators.skinny_linear(rows, [weight], bias)
    is_computed = output > -math.inf
    torch.testing.assert_close(output[is_computed], whole[is_computed], rtol=1e-5, atol=4e-6 * case["size"] ** 0.5)
    # In the arithmetic of the product itself: nothing that was left out is larger than the largest.
    best = whole.masked_fill(~is_computed, -math.inf).amax(-1)
    assert torch.equal(best, whole.amax(-1))


def test_most_outputs_are_left_out(operators: Any) -> None:
    rows, weight, _ = inputs(dict(seed=1, rows=4, size=512, width=8000, bias=False, spread=1.0))
    output = operators.screened_linear(rows, weight, *ops.screen_weight(weight), None)
    computed = (output > -math.inf).sum(-1)
    assert (computed >= 1).all() and (computed < 200).all()


@pytest.mark.native
def test_they_are_those_of_the_product_to_the_last_digit(native: Any) -> None:
    rows, weight, bias = inputs(dict(seed=2, rows=13, size=530, width=3001, bias=True, spread=1.0))
    screening = ops.screen_weight(weight)
    output = native.screened_linear(rows, weight, *screening, bias)
    is_computed = output > -math.inf
    assert torch.equal(output[is_computed], native.skinny_linear(rows, [weight], bias)[is_computed])
    for count in range(1, 13):
        assert torch.equal(native.screened_linear(rows[:count], weight, *screening, bias), output[:count])


def test_codes_that_are_wrong_are_found_out(operators: Any) -> None:
    """The negative control: what is left out depends on the codes, so false ones hide the largest output."""
    rows, weight, _ = inputs(dict(seed=3, rows=1, size=64, width=500, bias=False, spread=1.0))
    codes, scales, errors = ops.screen_weight(weight)
    best = int(F.linear(rows, weight).argmax())
    codes[best] = -codes[best]
    output = operators.screened_linear(rows, weight, codes, scales, errors, None)
    assert output[0, best] == -math.inf


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e-3, 1.0, 1e30])
def test_screen_weight(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2050, 40, generator=generator) * scale
    weight[3] = 0
    codes, scales, errors = ops.screen_weight(weight)
    assert codes.dtype == torch.int8 and bool(errors[4:].isfinite().all()) is (scale < 1e30), "sums could overflow"
    left = torch.linalg.vector_norm(weight.double() - codes.double() * scales.double()[:, None], dim=1)
    assert (left <= errors).all()
    if 1e-30 <= scale < 1e30:
        assert (errors[4:] < 0.02 * torch.linalg.vector_norm(weight.double(), dim=1)[4:]).all()


def test_rounding_is_within_the_bound(operators: Any) -> None:
    """Weights that the codes lose nothing of, and rows of them that differ by no more than rounding does."""
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    for size in (64, 512, 2000):
        whole = torch.randint(-127, 128, (1, size), generator=generator).float()
        whole[0, 0] = 127.0
        weight = whole[:, torch.randperm(size, generator=generator)].repeat(400, 1)
        weight = torch.stack([row[torch.randperm(size, generator=generator)] for row in weight])
        row = torch.ones(1, size) + 1e-6 * torch.randn(1, size, generator=generator)
        codes, scales, errors = ops.screen_weight(weight)
        about = (row.double() @ codes.double().t()) * scales.double()
        for computed in (F.linear(row, codes.float()) * scales, operators.skinny_linear(row, [weight], None)):
            off = (computed.double() - about).abs()[0]
            assert (off <= errors * torch.linalg.vector_norm(row)).all()
            worst = max(worst, float((off / errors).max()))
        output = operators.screened_linear(row, weight, codes, scales, errors, None)
        whole_product = operators.skinny_linear(row, [weight], None)
        is_computed = output > -math.inf
        assert torch.equal(whole_product.masked_fill(~is_computed, -math.inf).amax(-1), whole_product.amax(-1))
    assert worst > 1e-4, "nothing was rounded: the test shows nothing"


@pytest.mark.parametrize(("row_scale", "weight_scale"), [(1e-20, 1e-23), (1e-3, 1e-38), (1.0, 1e38), (1e30, 1e30)])
def test_the_ends_of_float32(operators: Any, row_scale: float, weight_scale: float) -> None:
    for seed in range(200):
        rows, weight, _ = inputs(dict(seed=seed, rows=2, size=48, width=40, bias=False, spread=1.0))
        rows, weight = rows * row_scale, weight * weight_scale
        output = operators.screened_linear(rows, weight, *ops.screen_weight(weight), None)
        assert torch.equal(output.argmax(-1), operators.skinny_linear(rows, [weight], None).argmax(-1))


def test_infinities_and_nan(operators: Any) -> None:
    """In a row, all is computed; in a weight, what may be the largest."""
    rows, weight = torch.ones(3, 40), torch.ones(6, 40)
    rows[1, 3], rows[2, 3] = math.inf, math.nan
    output = operators.screened_linear(rows, weight, *ops.screen_weight(weight), None)
    assert (output[0] == 40).all() and (output[1] == math.inf).all() and output[2].isnan().all()
    weight = torch.arange(1.0, 7).expand(40, 6).t().clone()
    weight[1, 2], weight[2, 2] = math.inf, math.nan
    output = operators.screened_linear(rows[:1], weight, *ops.screen_weight(weight), None)
    assert output[0, 1] == math.inf and output[0, 2].isnan()


def test_shapes(operators: Any) -> None:
    weight = torch.ones(5, 4)
    screening = ops.screen_weight(weight)
    assert operators.screened_linear(torch.ones(2, 3, 4), weight, *screening, None).shape == (2, 3, 5)
    assert operators.screened_linear(torch.ones(4), weight, *screening, None).shape == (5,)
    assert operators.screened_linear(torch.ones(0, 4), weight, *screening, None).shape == (0, 5)
    empty = ops.screen_weight(weight[:, :0])
    assert torch.equal(
        operators.screened_linear(torch.ones(2, 0), weight[:, :0], *empty, torch.ones(5)), torch.ones(2, 5)
    )


ROWS, WEIGHT, CODES, EACH = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.int8), torch.zeros(5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.tensor(1.0), WEIGHT, CODES, EACH, EACH, None), ValueError, r"rows must be \[..., size\]"),
        (
            (ROWS, WEIGHT.t(), CODES, EACH, EACH, None),
            ValueError,
            r"weight must be \[width, 4\], not of shape \[4, 5\]",
        ),
        ((ROWS, WEIGHT, CODES[1:], EACH, EACH, None), ValueError, r"codes must be \[5, 4\], not of shape \[4, 4\]"),
        ((ROWS, WEIGHT, CODES.int(), EACH, EACH, None), TypeError, r"codes must be int8, not .*(int32|int)"),
        ((ROWS, WEIGHT, CODES.to("meta"), EACH, EACH, None), ValueError, r"rows are on cpu and codes on meta"),
        ((ROWS, WEIGHT, CODES, EACH[1:], EACH, None), ValueError, r"scales must be \[5\], not of shape \[4\]"),
        ((ROWS, WEIGHT, CODES, EACH, EACH[:, None], None), ValueError, r"errors must be \[5\], not of shape \[5, 1\]"),
        ((ROWS, WEIGHT, CODES, EACH, EACH, EACH[1:]), ValueError, r"bias must be \[5\], not of shape \[4\]"),
        ((ROWS.double(), WEIGHT, CODES, EACH, EACH, None), TypeError, r"rows must be float32, not .*(double|float64)"),
        ((ROWS, WEIGHT.half(), CODES, EACH, EACH, None), TypeError, r"weight must be float32, not .*([Hh]alf|float16)"),
        ((ROWS, WEIGHT, CODES, EACH.half(), EACH, None), TypeError, r"scales must be float32, not .*([Hh]alf|float16)"),
    ],
)
def test_bad_arguments(operators: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operators.screened_linear(*arguments)
