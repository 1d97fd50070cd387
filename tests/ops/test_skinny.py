"""skinny_linear against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_attention import EXAMPLES
from torch import Tensor

from fastgen.ops import reference

CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.one_of(st.integers(1, 14), st.just(40)),
        "size": st.one_of(st.integers(1, 70), st.sampled_from([96, 512, 1000])),
        "widths": st.lists(st.one_of(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=4),
        "bias": st.booleans(),
        "layout": st.sampled_from(["dense", "apart", "transposed"]),
        "threads": st.sampled_from([1, 2]),
    }
)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere, and NaN around them."""
    if layout == "apart":
        buffer = torch.full((len(x) + 1, x.shape[1] + 3), math.nan)
        buffer[: len(x), : x.shape[1]] = x
        return buffer[: len(x), : x.shape[1]]
    return x.t().contiguous().t() if layout == "transposed" else x


def exact(rows: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    output = rows.double() @ torch.cat(weights).double().t()
    return output if bias is None else output + bias.double()


def inputs(case: dict[str, Any]) -> tuple[Tensor, list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(case["rows"], case["size"], generator=generator)
    weights = [torch.randn(width, case["size"], generator=generator) for width in case["widths"]]
    return rows, weights, torch.randn(sum(case["widths"]), generator=generator) if case["bias"] else None


@CASES
@given(case=cases)
@example(case=dict(seed=0, rows=1, size=1, widths=[1], bias=True, layout="dense", threads=1))
@example(case=dict(seed=0, rows=13, size=67, widths=[5, 0, 3], bias=True, layout="apart", threads=2))
def test_product(operators: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    rows, weights, bias = inputs(case)
    layout = case["layout"]
    output = operators.skinny_linear(laid_out(rows, layout), [laid_out(weight, layout) for weight in weights], bias)
    assert output.is_contiguous() and output.dtype == torch.float32
    largest = float(max(1.0, case["size"] ** 0.5))
    torch.testing.assert_close(output.double(), exact(rows, weights, bias), rtol=1e-5, atol=4e-6 * largest)


@pytest.mark.parametrize("size", [64, 512, 2048])
def test_the_error_is_no_more_than_twice_that_of_torch(native: Any, size: int) -> None:
    arguments = inputs(dict(seed=3, rows=5, size=size, widths=[300, 41], bias=True))
    errors = [
        float((kind.skinny_linear(*arguments).double() - exact(*arguments)).abs().max()) for kind in (native, reference)
    ]
    assert 0 < errors[0] <= 2 * errors[1]


def test_a_row_is_the_same_whatever_the_others_are(native: Any, threads: Any) -> None:
    """However many rows, weights and threads: a sentence's scores do not depend on its batch."""
    rows, weights, bias = inputs(dict(seed=1, rows=13, size=530, widths=[301, 9], bias=True))
    assert bias is not None
    threads(1)
    together = native.skinny_linear(rows, weights, bias)
    threads(2)
    for count in range(1, 14):
        assert torch.equal(native.skinny_linear(rows[:count], weights, bias), together[:count])
    assert torch.equal(native.skinny_linear(rows, weights[1:], bias[301:]), together[:, 301:])


def test_shapes(operators: Any) -> None:
    weight = torch.ones(5, 4)
    assert operators.skinny_linear(torch.ones(2, 3, 4), [weight], None).shape == (2, 3, 5)
    assert torch.equal(operators.skinny_linear(torch.ones(4), [weight], None), torch.full((5,), 4.0))
    assert operators.skinny_linear(torch.ones(0, 4), [weight, weight], None).shape == (0, 10)
    assert torch.equal(operators.skinny_linear(torch.ones(2, 0), [weight[:, :0]], torch.ones(5)), torch.ones(2, 5))


def test_infinities_and_nan(operators: Any) -> None:
    rows = torch.ones(3, 40)
    rows[1, 3], rows[2, 3] = math.inf, math.nan
    output = operators.skinny_linear(rows, [torch.ones(6, 40)], None)
    assert (output[0] == 40).all() and (output[1] == math.inf).all() and output[2].isnan().all()


ROWS, WEIGHT = torch.zeros(2, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("rows", "weights", "bias", "error", "message"),
    [
        (torch.tensor(1.0), [WEIGHT], None, ValueError, r"rows must be \[..., size\], not of shape \[\]"),
        (ROWS, [], None, ValueError, r"weights must be one tensor or more"),
        (ROWS, [WEIGHT, WEIGHT.t()], None, ValueError, r"weights must be \[width, 4\], not of shape \[4, 5\]"),
        (ROWS, [WEIGHT[0]], None, ValueError, r"weights must be \[width, 4\], not of shape \[4\]"),
        (ROWS, [WEIGHT, WEIGHT], torch.zeros(5), ValueError, r"bias must be \[10\], not of shape \[5\]"),
        (ROWS.double(), [WEIGHT], None, TypeError, r"rows must be float32, not .*(double|float64)"),
        (ROWS, [WEIGHT.bfloat16()], None, TypeError, r"weights must be float32, not .*(BFloat16|bfloat16)"),
        (ROWS, [WEIGHT], torch.zeros(5).half(), TypeError, r"bias must be float32, not .*([Hh]alf|float16)"),
    ],
)
def test_bad_arguments(
    operators: Any, rows: Tensor, weights: list[Tensor], bias: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.skinny_linear(rows, weights, bias)
