"""beam_attention against brute force in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES
from references import reference
from torch import Tensor

from fastgen.layers import attention

CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
LOWEST = torch.finfo(torch.float32).min

BIASES = ["none", "ancestry", "infinite", "padding", "heads", "beams", "one", "columns", "wide"]

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "batch": st.integers(1, 3),
        "beams": st.one_of(st.integers(1, 8), st.just(13)),
        "key_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "keys": st.one_of(st.integers(1, 40), st.integers(1, 700), st.sampled_from([255, 256, 257, 512, 1000])),
        "size": st.one_of(st.integers(1, 80), st.sampled_from([16, 32, 64, 96, 128])),
        "value_size": st.one_of(st.integers(1, 80), st.sampled_from([16, 32, 64, 96, 128])),
        "scale": st.sampled_from([None, 1.0, 0.0, -0.5]),
        "spread": st.sampled_from([1.0, 0.0, 30.0]),
        "bias": st.sampled_from(
            ["none", "ancestry", "infinite", "padding", "heads", "beams", "one", "columns", "wide"]
        ),
        "layout": st.sampled_from(["dense", "in a buffer", "heads inside", "columns apart"]),
        "threads": st.sampled_from([1, 2]),
    }
)


def bias_of(kind: str, batch: int, heads: int, beams: int, keys: int, generator: torch.Generator) -> Tensor | None:
    """Additive; at least one key of each row is seen."""
    if kind == "none":
        return None
    if kind in ("ancestry", "infinite", "padding"):
        hidden = torch.rand(batch, 1, 1 if kind == "padding" else beams, keys, generator=generator) < 0.6
        hidden[..., int(torch.randint(keys, (), generator=generator))] = False
        return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf if kind == "infinite" else LOWEST)
    shape = {
        "heads": (1, heads, 1, keys),
        "beams": (1, heads, beams, keys),
        "one": (batch, 1, 1, 1),
        "columns": (batch, heads, beams, 1),
        "wide": (batch, heads, beams, keys),
    }[kind]
    bias = torch.randn(shape, generator=generator) * 3
    return bias.mT.contiguous().mT if kind == "wide" else bias.expand(-1, -1, beams, -1) if kind == "heads" else bias


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere, and NaN around them."""
    batch, heads, length, size = x.shape
    if layout == "in a buffer":  # as in the tree, whose further slots may hold anything
        buffer = torch.full((batch, heads, length + 9, size + 3), math.nan)
        buffer[:, :, :length, :size] = x
        return buffer[:, :, :length, :size]
    if layout == "heads inside":  # as the hosts project them
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.mT.contiguous().mT if layout == "columns apart" else x


def inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    generator = torch.Generator().manual_seed(case["seed"])
    batch, beams, keys, size = case["batch"], case["beams"], case["keys"], case["size"]
    heads = case["key_heads"] * case["group"]
    query = torch.randn(batch * beams, heads, 1, size, generator=generator) * case["spread"]
    key = torch.randn(batch, case["key_heads"], keys, size, generator=generator)
    value = torch.randn(batch, case["key_heads"], keys, case["value_size"], generator=generator)
    scale = size**-0.5 if case["scale"] is None else case["scale"]
    return query, key, value, bias_of(case["bias"], batch, heads, beams, keys, generator), scale


def brute_force(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One row and head after the other, in float64."""
    rows, heads, _, _ = query.shape
    beams, group = rows // len(key), heads // key.shape[1]
    if bias is not None:
        bias = bias.double().expand(len(key), heads, beams, key.shape[2])
    output = torch.empty(rows, 1, heads, value.shape[3], dtype=torch.float64)
    for row in range(rows):
        sentence, beam = divmod(row, beams)
        for head in range(heads):
            scores = key[sentence, head // group].double() @ query[row, head, 0].double() * scale
            if bias is not None:
                scores = scores + bias[sentence, head, beam]
            output[row, 0, head] = scores.softmax(0) @ value[sentence, head // group].double()
    return output


def error_of(output: Tensor, exact: Tensor) -> float:
    return float((output.double() - exact).abs().max())


@CASES
@given(case=cases)
@example(
    case=dict(seed=0, batch=1, beams=1, key_heads=1, group=1, keys=1, size=1, value_size=1)
    | dict(scale=None, spread=1.0, bias="none", layout="dense", threads=1)
)
@example(  # more rows than a tile, two blocks of keys, floats beyond the last vector
    case=dict(seed=1, batch=2, beams=5, key_heads=2, group=3, keys=300, size=72, value_size=41)
    | dict(scale=None, spread=1.0, bias="ancestry", layout="in a buffer", threads=2)
)
def test_attention(operators: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    query, key, value, bias, scale = inputs(case)
    key, value = (laid_out(x, case["layout"]) for x in (key, value))
    output = operators.beam_attention(laid_out(query, case["layout"]), key, value, bias, scale)
    assert output.is_contiguous() and output.dtype == torch.float32
    # A score is rounded in its own size, and its rounding is an error of the weight's size.
    largest = abs(scale) * query.abs().max() * key.abs().max() * math.sqrt(case["size"])
    tolerance = 4e-6 * max(1.0, float(largest))
    torch.testing.assert_close(output.double(), brute_force(query, key, value, bias, scale), rtol=1e-5, atol=tolerance)


SHAPES = [
    dict(batch=8, beams=4, key_heads=8, group=1, keys=30, size=64, bias="ancestry"),
    dict(batch=1, beams=4, key_heads=12, group=1, keys=512, size=64, bias="none"),
    dict(batch=1, beams=5, key_heads=8, group=1, keys=1500, size=64, bias="none"),
    dict(batch=2, beams=4, key_heads=3, group=3, keys=550, size=64, bias="infinite"),
    dict(batch=1, beams=8, key_heads=2, group=4, keys=2000, size=128, bias="padding"),
    dict(batch=4, beams=1, key_heads=4, group=1, keys=4000, size=80, bias="none"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_no_more_than_twice_that_of_torch(native: Any, shape: dict[str, Any]) -> None:
    for spread in (0.3, 1.0, 6.0):
        arguments = inputs({"seed": 3, "value_size": shape["size"], "scale": None, "spread": spread, **shape})
        exact = brute_force(*arguments)
        ours = error_of(native.beam_attention(*arguments), exact)
        assert 0 < ours <= 2 * error_of(reference.beam_attention(*arguments), exact)


def test_hidden_keys_count_for_nothing(operators: Any) -> None:
    """Not even where their values are huge; and where all are hidden by the same amount, they are as if seen."""
    case = dict(seed=5, batch=2, beams=3, key_heads=2, group=1, keys=300, size=16, value_size=16)
    query, key, value, bias, scale = inputs(case | dict(scale=None, spread=1.0, bias="none"))
    hiding = torch.zeros(2, 1, 3, 300)
    hiding[..., 7:290] = LOWEST
    shown = [i for i in range(300) if not 7 <= i < 290]
    expected = brute_force(query, key[:, :, shown], value[:, :, shown], bias, scale)
    value = value.clone()
    value[:, :, 7:290] = 1e38
    torch.testing.assert_close(operators.beam_attention(query, key, value, hiding, scale).double(), expected, **CLOSE)
    everything = operators.beam_attention(query * 0, key, value / 1e38, torch.full_like(hiding, LOWEST), scale)
    mean = (value / 1e38).double().mean(2).repeat_interleave(3, 0)[:, None]
    torch.testing.assert_close(everything.double(), mean, **CLOSE)


CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.parametrize("keys", [3, 300, 700])  # plain torch takes another way from 800 on
def test_infinities_and_nan(operators: Any, keys: int) -> None:
    case = dict(seed=5, batch=1, beams=6, key_heads=1, group=1, keys=keys, size=8, value_size=8)
    query, key, value, _, scale = inputs(case | dict(scale=None, spread=1.0, bias="none"))
    bias = torch.zeros(1, 1, 6, keys)
    bias[0, 0, 0] = -math.inf  # sees nothing
    bias[0, 0, 1, :-1] = -math.inf  # sees the last key alone
    bias[0, 0, 2, 1] = math.nan
    bias[0, 0, 3, keys // 2] = math.inf
    bias[0, 0, 4, 1:] = -math.inf  # the first alone
    output = operators.beam_attention(query, key, value, bias, scale)[:, 0, 0]
    assert output.isnan().all(1).tolist() == [True, False, True, True, False, False]
    assert torch.equal(output[1], value[0, 0, -1]) and torch.equal(output[4], value[0, 0, 0])
    exact = brute_force(query, key, value, bias, scale)[:, 0, 0]
    torch.testing.assert_close(output.double(), exact, **CLOSE, equal_nan=True)
    value[0, 0, 0, 2] = math.nan  # reaches the rows that see it, and as 0 * NaN those that don't
    output = operators.beam_attention(query, key, value, bias, scale)[:, 0, 0]
    assert output[:, 2].isnan().all() and not output[[1, 4, 5]][:, [0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_the_order_of_keys_and_the_threads_change_little(native: Any, threads: Any) -> None:
    """As many blocks of keys have their maximum first as last: what came before is scaled down, or what comes."""
    case = dict(seed=9, batch=3, beams=4, key_heads=3, group=2, keys=1500, size=64, value_size=64)
    query, key, value, _, scale = inputs(case | dict(scale=None, spread=10.0, bias="none"))
    order = (key[0, 0] @ query[0, 0, 0]).argsort()
    exact = brute_force(query, key, value, None, scale)
    outputs = []
    for places in (order, order.flip(0)):
        for number in (1, 2, 3):
            threads(number)
            outputs.append(native.beam_attention(query, key[:, :, places], value[:, :, places], None, scale))
            torch.testing.assert_close(outputs[-1].double(), exact, rtol=1e-5, atol=2e-5)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])  # threads change nothing


def test_no_keys_and_no_rows(operators: Any) -> None:
    query, key = torch.ones(4, 2, 1, 8), torch.ones(2, 2, 0, 8)
    assert torch.equal(operators.beam_attention(query, key, key, None, 1.0), torch.zeros(4, 1, 2, 8))
    assert operators.beam_attention(query[:0], key, key, None, 1.0).shape == (0, 1, 2, 8)
    keys = torch.ones(2, 2, 3, 8)
    assert operators.beam_attention(query[:0], keys, keys, torch.zeros(2, 1, 1, 3), 1.0).shape == (0, 1, 2, 8)


QUERY, KEY = torch.zeros(6, 4, 1, 8), torch.zeros(3, 2, 5, 8)


@pytest.mark.parametrize(
    ("query", "key", "value", "bias", "error", "message"),
    [
        (QUERY, KEY[0], KEY, None, ValueError, r"key must be \[batch, key heads, keys, size\], not of"),
        (QUERY[:5], KEY, KEY, None, ValueError, r"query must be \[3 \* beams, heads, 1, 8\], heads a multiple of 2"),
        (QUERY[:, :3], KEY, KEY, None, ValueError, r"heads a multiple of 2, not of shape \[6, 3, 1, 8\]"),
        (QUERY[..., :7], KEY, KEY, None, ValueError, r"query must be"),
        (QUERY, KEY, KEY[:, :, :4], None, ValueError, r"value must be \[3, 2, 5, size\], not of shape \[3, 2, 4, 8\]"),
        (QUERY, KEY, KEY, torch.zeros(3, 2, 2, 5), ValueError, r"bias must be broadcastable to \[3, 4, 2, 5\], not of"),
        (QUERY, KEY, KEY, torch.zeros(2, 5), ValueError, r"bias must be broadcastable to \[3, 4, 2, 5\], not of shape"),
        (QUERY.double(), KEY, KEY, None, TypeError, r"query must be float32, not .*(double|float64)"),
        (QUERY, KEY, KEY.half(), None, TypeError, r"value must be float32, not .*([Hh]alf|float16)"),
        (QUERY, KEY, KEY, torch.zeros(1, 1, 1, 5).bool(), TypeError, r"bias must be float32, not .*bool"),
    ],
)
def test_bad_arguments(
    operators: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        operators.beam_attention(query, key, value, bias, 1.0)


def test_what_takes_the_native_operator(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 without autograd and autocast; all else is computed by torch, and to the same result."""
    query, key, value, bias, scale = inputs(
        dict(seed=1, batch=2, beams=3, key_heads=2, group=2, keys=9, size=8, value_size=8)
        | dict(scale=None, spread=1.0, bias="ancestry")
    )
    calls = []
    operator = attention._native()
    monkeypatch.setattr(attention, "_native", lambda: lambda *args: calls.append(args) or operator(*args))
    expected = brute_force(query, key, value, bias, scale)
    torch.testing.assert_close(attention.beam_attention(query, key, value, bias, scale).double(), expected, **CLOSE)
    assert len(calls) == 1

    other = attention.beam_attention(query.double(), key.double(), value.double(), bias.double(), scale)
    torch.testing.assert_close(other, expected)
    half = attention.beam_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), bias.bfloat16(), scale)
    torch.testing.assert_close(half.double(), expected, rtol=0.1, atol=0.05)
    with torch.autocast("cpu"):
        autocast = attention.beam_attention(query, key, value, bias, scale)
    torch.testing.assert_close(autocast.double(), expected, rtol=0.1, atol=0.05)
    query.requires_grad_()
    attention.beam_attention(query, key, value, bias, scale).sum().backward()
    assert query.grad is not None and float(query.grad.abs().max()) > 0
    assert len(calls) == 1


@pytest.mark.parametrize("count", [2, 3, 12])
@pytest.mark.parametrize(("group", "beams"), [(8, 1), (5, 5), (19, 5), (97, 1), (3, 8)])
def test_rows_of_one_key_head_are_shared_among_threads(
    group: int, beams: int, count: int, native: Any, threads: Any
) -> None:
    """A sentence with one key head, as slim caches have it, would keep one thread busy and leave the others idle."""
    query, key = torch.randn(beams, group, 1, 40), torch.randn(1, 1, 600, 40)
    bias = torch.randn(1, group, beams, 600)
    threads(1)
    alone = native.beam_attention(query, key, key, bias, 0.2)
    threads(count)
    assert torch.equal(native.beam_attention(query, key, key, bias, 0.2), alone)
