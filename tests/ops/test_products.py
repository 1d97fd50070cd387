"""skinny_linear and packed_linear against float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES
from references import reference
from torch import Tensor
from torch.nn import functional as F

from fastgen import ops

CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.one_of(st.integers(1, 14), st.sampled_from([40, 132, 270])),
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


def multiply(kind: str, operators: Any, rows: Tensor, weights: list[Tensor], bias: Tensor | None) -> Any:
    if kind == "skinny":
        return operators.skinny_linear(rows, weights, bias)
    return operators.packed_linear(rows, ops.pack_weight(torch.cat(weights)), sum(map(len, weights)), bias)


both = pytest.mark.parametrize("kind", ["skinny", "packed"])


def exact(rows: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    output = rows.double() @ torch.cat(weights).double().t()
    return output if bias is None else output + bias.double()


def inputs(case: dict[str, Any]) -> tuple[Tensor, list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(case["seed"])
    rows = torch.randn(case["rows"], case["size"], generator=generator)
    weights = [torch.randn(width, case["size"], generator=generator) for width in case["widths"]]
    return rows, weights, torch.randn(sum(case["widths"]), generator=generator) if case["bias"] else None


@both
@CASES
@given(case=cases)
@example(case=dict(seed=0, rows=1, size=1, widths=[1], bias=True, layout="dense", threads=1))
@example(case=dict(seed=0, rows=13, size=67, widths=[5, 0, 3], bias=True, layout="apart", threads=2))
@example(case=dict(seed=0, rows=270, size=1000, widths=[64, 1], bias=True, layout="apart", threads=2))
@example(case=dict(seed=0, rows=7, size=600, widths=[0], bias=False, layout="dense", threads=1))
def test_product(kind: str, operators: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    rows, weights, bias = inputs(case)
    layout = case["layout"]
    output = multiply(kind, operators, laid_out(rows, layout), [laid_out(weight, layout) for weight in weights], bias)
    assert output.is_contiguous() and output.dtype == torch.float32
    largest = float(max(1.0, case["size"] ** 0.5))
    torch.testing.assert_close(output.double(), exact(rows, weights, bias), rtol=1e-5, atol=4e-6 * largest)


@both
@pytest.mark.parametrize("size", [64, 512, 3072])
def test_the_error_is_that_of_torch_or_little_more(kind: str, native: Any, size: int) -> None:
    arguments = inputs(dict(seed=3, rows=5, size=size, widths=[300, 41], bias=True))
    errors = [
        float((multiply(kind, each, *arguments).double() - exact(*arguments)).square().mean().sqrt())
        for each in (native, reference)
    ]
    assert 0 < errors[0] <= 2 * errors[1]


@both
def test_a_row_is_the_same_whatever_the_others_are(kind: str, native: Any, threads: Any) -> None:
    """However many rows, weights and threads: a sentence's scores do not depend on its batch."""
    rows, weights, bias = inputs(dict(seed=1, rows=13, size=530, widths=[301, 9], bias=True))
    assert bias is not None
    threads(1)
    together = multiply(kind, native, rows, weights, bias)
    threads(2)
    for count in range(1, 14):
        assert torch.equal(multiply(kind, native, rows[:count], weights, bias), together[:count])
    assert torch.equal(multiply(kind, native, rows, weights[1:], bias[301:]), together[:, 301:])


@both
def test_shapes(kind: str, operators: Any) -> None:
    weight = torch.ones(5, 4)
    assert multiply(kind, operators, torch.ones(2, 3, 4), [weight], None).shape == (2, 3, 5)
    assert torch.equal(multiply(kind, operators, torch.ones(4), [weight], None), torch.full((5,), 4.0))
    assert multiply(kind, operators, torch.ones(0, 4), [weight, weight], None).shape == (0, 10)
    output = multiply(kind, operators, torch.ones(2, 0), [weight[:, :0]], torch.ones(5))
    assert torch.equal(output, torch.ones(2, 5))


@both
def test_infinities_and_nan(kind: str, operators: Any) -> None:
    rows = torch.ones(3, 40)
    rows[1, 3], rows[2, 3] = math.inf, math.nan
    output = multiply(kind, operators, rows, [torch.ones(6, 40)], None)
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
        (ROWS, [WEIGHT.double()], None, TypeError, r"weights must be float32, float16 or bfloat16, not .*(double|64)"),
        (ROWS, [WEIGHT.half().to("meta")], None, ValueError, "rows are on cpu and weights on meta"),
        (ROWS, [WEIGHT], torch.zeros(5).half(), TypeError, r"bias must be float32, not .*([Hh]alf|float16)"),
    ],
)
def test_bad_arguments_of_skinny_linear(
    operators: Any, rows: Tensor, weights: list[Tensor], bias: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.skinny_linear(rows, weights, bias)


PACKED = torch.zeros(2, 4, 64)


@pytest.mark.parametrize(
    ("rows", "packed", "width", "bias", "error", "message"),
    [
        (torch.tensor(1.0), PACKED, 70, None, ValueError, r"rows must be \[..., size\], not of shape \[\]"),
        (ROWS, PACKED, 129, None, ValueError, r"packed must be \[3, 4, 64\], not of shape \[2, 4, 64\]"),
        (ROWS, PACKED[:, :3], 70, None, ValueError, r"packed must be \[2, 4, 64\], not of shape \[2, 3, 64\]"),
        (ROWS, PACKED, -1, None, ValueError, r"packed must be"),
        (ROWS, PACKED, 70, torch.zeros(64), ValueError, r"bias must be \[70\], not of shape \[64\]"),
        (ROWS.double(), PACKED, 70, None, TypeError, r"rows must be float32, not .*(double|float64)"),
        (ROWS, PACKED.half(), 70, None, TypeError, r"packed must be float32, not .*([Hh]alf|float16)"),
        (ROWS, PACKED, 70, torch.zeros(70).half(), TypeError, r"bias must be float32, not .*([Hh]alf|float16)"),
    ],
)
def test_bad_arguments_of_packed_linear(
    operators: Any, rows: Tensor, packed: Tensor, width: int, bias: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.packed_linear(rows, packed, width, bias)


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 200])
def test_pack_weight(width: int) -> None:
    weight = torch.randn(7, width).t()
    packed = ops.pack_weight(weight)
    assert packed.shape == (-(-width // 64), 7, 64) and packed.is_contiguous()
    flat = packed.transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[:width], weight) and not flat[width:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12])
def test_weights_in_half_precision(operators: Any, rows: int, dtype: torch.dtype) -> None:
    """The same as with the float32 numbers that they are: subnormal ones, infinities and NaN too."""
    generator = torch.Generator().manual_seed(rows)
    for size, width in [(1, 1), (7, 5), (16, 4), (31, 9), (33, 2), (70, 70), (512, 33)]:
        halves = (torch.randn(width, size, generator=generator) * 10.0 ** (size % 9 - 6)).to(dtype)
        x = torch.randn(rows, size, generator=generator)
        weights, bias = [halves, torch.randn(3, size, generator=generator)], torch.randn(width + 3, generator=generator)
        assert torch.equal(
            operators.skinny_linear(x, weights, bias), operators.skinny_linear(x, [w.float() for w in weights], bias)
        )
    tiny = torch.finfo(dtype).smallest_normal / 8
    special = torch.tensor([[math.inf, 1.0, tiny], [-math.inf, -0.0, 65504.0], [math.nan, 0.0, 1.0]]).to(dtype)
    x = torch.ones(rows, 3)
    torch.testing.assert_close(
        operators.skinny_linear(x, [special], None), F.linear(x, special.float()), rtol=0, atol=0, equal_nan=True
    )


_FIRST_PRODUCT = """
import torch
torch.set_default_dtype(torch.float64)
from fastgen import ops
rows, weight = torch.ones(1, 2048, dtype=torch.float32), torch.ones(1024, 2048, dtype=torch.float32)
assert ops.is_native(rows.device), "not native"
assert (ops.skinny_linear(rows, [weight], None) == 2048).all()
"""


def test_the_first_product_of_a_process_whatever_the_default_dtype(native: Any) -> None:
    """It times which way of reading weights is faster here."""
    subprocess.run([sys.executable, "-c", _FIRST_PRODUCT], check=True, timeout=120)


FORKED = """
import os, signal, sys, threading, time, torch
from fastgen import ops

torch.set_num_threads(1)
assert ops.is_native(torch.device("cpu"))
rows, weight = torch.randn(1, 512), torch.randn(4096, 512)
first = threading.Thread(target=ops.skinny_linear, args=(rows, [weight]))
first.start()
time.sleep(float(sys.argv[1]))  # it is measuring how weights are read here
child = os.fork()
if child == 0:
    signal.alarm(60)
    ops.skinny_linear(rows, [weight])
    os._exit(0)
_, status = os.waitpid(child, 0)
first.join()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.02])
def test_a_process_that_is_forked_during_the_first_product(native: Any, seconds: float) -> None:
    words = [sys.executable, "-c", FORKED, str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
