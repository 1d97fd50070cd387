"""Products with weights in fewer bits: near those in float32, where the user has chosen them, never of old weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weight_edits import EDITS

import fastgen
from fastgen import ops
from fastgen.config import WORDS_OF_WEIGHTS
from fastgen.layers import linear, packed_weights, quantized
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits
from fastgen.ops.quantized import LONGEST_SUM

FEW, MANY = linear._SKINNY_ROWS, 40


# In 8 bits all other weights of the output are rounded to 0; bfloat16 rounds it to infinity.
TOO_LARGE = {"int8": 1000.0, "bf16": torch.finfo(torch.float32).max}
FAR = {"int8": "%", "bf16": "up to infinity"}


@pytest.fixture(autouse=True)
def _empty(rounded_weights: None) -> Iterator[None]:
    linear._verdicts.clear()
    yield
    linear._verdicts.clear()


@pytest.fixture(params=["int8", "bf16"])
def weights(request: Any) -> Any:
    return request.param


@pytest.fixture(params=[1, FEW, FEW + 1, MANY])
def count(request: Any, weights: str) -> int:
    """Of rows: up to `FEW` they stay in float32."""
    if (why := quantized.unavailable(quantized.WAYS[weights][int(request.param > FEW)].product)) is not None:
        pytest.skip(why)
    assert isinstance(request.param, int)
    return request.param


def stock(layer: Any, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, layer.weight, layer.bias)


@torch.no_grad()
def multiply(layer: Any, rows: Tensor, weights: str = "int8", mode: str = "always") -> Tensor:
    products = LinearDispatcher(mode, weights)
    output = products(layer, rows, stock)
    assert products.count == 1
    return output


@torch.no_grad()
def in_fewer_bits(layer: Any, rows: Tensor, weights: str = "int8") -> Tensor:
    """The product with rounded weights, and with rounded rows where there are many."""

    def rounded(x: Tensor) -> Tensor:
        if weights == "bf16":
            return x.bfloat16().double()
        codes, scales = ops.quantize_weight(x)
        return codes.double() * scales.double()[:, None]

    output = (rounded(rows) if len(rows) > FEW else rows.double()) @ rounded(layer.weight).t()
    if weights == "bf16" and len(rows) > FEW:
        output = output.bfloat16().double()  # what oneDNN returns
    return output + layer.bias.double()


def assert_rounded(output: Tensor, layer: Any, rows: Tensor, weights: str = "int8") -> None:
    """Sums in another order may fall on the other side where they are rounded to bfloat16."""
    rtol = 2**-7 if weights == "bf16" and len(rows) > FEW else 1e-4
    torch.testing.assert_close(output.double(), in_fewer_bits(layer, rows, weights), rtol=rtol, atol=1e-4)


@torch.no_grad()
def test_product(weights: str, count: int) -> None:
    torch.manual_seed(0)
    for size, width in [(1, 1), (48, 64), (257, 33), (512, 1000)]:
        layer, rows = nn.Linear(size, width), torch.randn(count, size)
        output = multiply(layer, rows, weights)
        assert_rounded(output, layer, rows, weights)
        assert size == 1 or not torch.allclose(output, stock(layer, rows), rtol=1e-5, atol=1e-6), "not rounded"
        assert torch.equal(multiply(layer, rows[:, None, None], weights)[:, 0, 0], output), "rows of any shape"


@torch.no_grad()
def test_transposed(weights: str, count: int) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 64), torch.randn(count, 48)
    other = nn.Module()
    other.weight, other.bias = nn.Parameter(layer.weight.t().contiguous()), layer.bias
    output = LinearDispatcher("always", weights)(other, rows, stock, transposed=True)
    assert torch.equal(output, multiply(layer, rows, weights))


@pytest.mark.parametrize("change", EDITS)
def test_a_changed_weight(change: Any, weights: str, count: int) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 64), torch.randn(count, 48)
    before = multiply(layer, rows, weights)
    change(layer)
    output = multiply(layer, rows, weights)
    assert_rounded(output, layer, rows, weights)
    assert not torch.equal(before, output)


def test_an_unchanged_weight_is_rounded_once(weights: str, count: int) -> None:
    layer, rows = nn.Linear(48, 64), torch.randn(count, 48)
    before = multiply(layer, rows, weights)
    size = 48 * 64 + 4 * 64 if weights == "int8" else 2 * 48 * 64
    assert (packed_weights.count(), packed_weights.nbytes()) == (1, size)
    ((*_, copy),) = packed_weights.all_rounded()
    assert torch.equal(multiply(layer, rows, weights), before)
    assert packed_weights.all_rounded()[0][2] is copy
    packed_weights.release()
    assert packed_weights.count() == 0 and quantized.summary() == ""


@torch.no_grad()
def test_a_layer_that_loses_too_much_stays_in_float32(weights: str, count: int) -> None:
    torch.manual_seed(0)
    layer, good, rows = nn.Linear(48, 64), nn.Linear(48, 64), torch.randn(count, 48)
    layer.weight[:, 7] = TOO_LARGE[weights]
    rows[:, 7] = 0.0
    output = multiply(layer, rows, weights)
    torch.testing.assert_close(output, stock(layer, rows), rtol=1e-5, atol=1e-5)
    word = WORDS_OF_WEIGHTS[weights]
    said = (
        f" linear layers in {word}, so outputs may differ from the host's; products of 1 stay in float32, where {word}"
    )
    assert quantized.summary().startswith("0" + said) and quantized.summary().endswith(FAR[weights] + ", 64 x 48)")
    multiply(good, rows, weights)
    assert quantized.summary().startswith("1" + said)
    assert f"rounded weights: 1 linear layers in {word}, so outputs may differ" in str(fastgen.status())


@pytest.mark.parametrize("half", packed_weights.HALVES, ids=str)
@torch.no_grad()
def test_weights_that_16_bits_hold_are_not_rounded(half: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 64).to(half).float(), torch.randn(3, 48)
    assert torch.equal(multiply(layer, rows, "bf16"), multiply(layer, rows, "float32"))
    assert not packed_weights.all_rounded() and quantized.summary() == ""
    if quantized.unavailable(quantized.multiply_packed_bfloat16) is None:  # the rows are rounded, where they are many
        rows = torch.randn(MANY, 48)
        assert_rounded(multiply(layer, rows, "bf16"), layer, rows, "bf16")
        assert quantized.summary().startswith("1 linear layers in bfloat16")


@torch.no_grad()
def test_few_rows_and_many() -> None:
    """Two copies of one layer, which is counted once; both follow an edit."""
    if (why := quantized.unavailable(quantized.multiply_packed_bfloat16)) is not None:
        pytest.skip(why)
    layer, size = nn.Linear(48, 64), 2 * 48 * 64
    for edited in range(2):
        for count, copies in ((3, 1), (MANY, 2)):
            rows = torch.randn(count, 48)
            assert_rounded(multiply(layer, rows, "bf16"), layer, rows, "bf16")
            if not edited:
                assert (packed_weights.count(), packed_weights.nbytes()) == (copies, copies * size)
        layer.weight.data.mul_(-2)
    assert quantized.summary().startswith("1 linear layers in bfloat16")
    quantized.drop_unchosen([layer])
    assert packed_weights.count() == 2
    packed_weights.drop_rounded([layer], lambda copy: True)
    assert packed_weights.count() == 0


@pytest.mark.parametrize("fault", ["processor", "operator", "numbers"])
def test_bfloat16_that_is_multiplied_wrongly_or_slowly_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    supported = {"_is_avx512_bf16_supported": fault != "processor", "_is_amx_tile_supported": False}
    for name, is_supported in supported.items():
        monkeypatch.setattr(torch.cpu, name, lambda is_supported=is_supported: is_supported, raising=False)

    def wrong(rows: Tensor, weights: Any, bias: Any) -> Tensor:
        if fault == "operator":
            raise RuntimeError("no such primitive")
        return torch.zeros(33, 48)

    monkeypatch.setattr(quantized, "multiply_packed_bfloat16", wrong)
    monkeypatch.setattr(quantized, "to_packed_bfloat16", lambda weight: weight)  # some processors have none
    why = {"processor": "this processor", "operator": r"this torch .*\(no such primitive\)", "numbers": "is wrong by"}
    found = quantized._wrong_bfloat16()
    assert found is not None and re.search(why[fault], found)


@torch.no_grad()
def test_siblings_share_a_product(weights: str, count: int) -> None:
    torch.manual_seed(0)
    q, k, v = nn.Linear(48, 64), nn.Linear(48, 16), nn.Linear(48, 16)
    products = LinearDispatcher("always", weights)
    for step in range(3):
        rows = torch.randn(count, 48)
        for layer in (q, k, v):
            output = products(layer, rows, stock)
            assert_rounded(output, layer, rows, weights)
        joint = [plan for plan in products._plans.values() if plan is not None and plan.is_joint]
        assert bool(joint) == (step > 0 and count <= FEW)
        products(nn.Linear(1, 1), torch.ones(count, 1), stock)  # the next input is another
    assert products.count == 12


@torch.no_grad()
def test_products_are_planned_once(weights: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(48, 64), nn.Linear(48, 16), nn.Linear(48, 16)]
    other, products, planned = nn.Linear(48, 8), LinearDispatcher("always", weights), []
    plan = LinearDispatcher._plan
    monkeypatch.setattr(LinearDispatcher, "_plan", lambda self, *args: (planned.append(1), plan(self, *args))[1])
    after = []
    for _ in range(5):
        rows = torch.randn(count, 48)
        for layer in layers:
            products(layer, rows, stock)
        products(other, torch.ones(count, 48), stock)
        after.append(len(planned))
    assert after[-1] == after[2]


@torch.no_grad()
def test_siblings_of_which_one_loses_too_much(weights: str) -> None:
    torch.manual_seed(0)
    q, k = nn.Linear(48, 64), nn.Linear(48, 64)
    k.weight[:, 7] = TOO_LARGE[weights]
    products = LinearDispatcher("always", weights)
    for _ in range(3):
        rows = torch.randn(2, 48)
        rows[:, 7] = 0.0
        assert_rounded(products(q, rows, stock), q, rows, weights)
        torch.testing.assert_close(products(k, rows, stock), stock(k, rows), rtol=1e-5, atol=1e-5)
        products(nn.Linear(1, 1), torch.ones(2, 1), stock)


@torch.no_grad()
def test_float32_where_memory_is_short_or_the_clock_against_it(
    weights: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = nn.Linear(512, 512), torch.randn(count, 512)
    monkeypatch.setattr(linear, "is_faster", lambda *args, **kwargs: False)
    assert torch.equal(LinearDispatcher("auto", weights)(layer, rows, stock), stock(layer, rows))
    monkeypatch.setattr(limits, "may_keep", lambda *args, **kwargs: False)
    torch.testing.assert_close(LinearDispatcher("always", weights)(layer, rows, stock), stock(layer, rows))
    assert quantized.summary() == "" and packed_weights.count() == 0


@torch.no_grad()
def test_integers_that_torch_multiplies_wrongly_are_multiplied_by_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does without VNNI: rows made positive by adding 128, and sums of two products that end at 32767."""
    right = torch._int_mm
    are_wrong = quantized._are_integers_wrong

    def saturated(a: Tensor, b: Tensor) -> Tensor:
        pairs = ((a.int() + 128)[:, :, None] * b.int()[None]).unflatten(1, (-1, 2)).sum(2).clamp(-32768, 32767)
        return (pairs.sum(1) - 128 * b.int().sum(0)).int()

    def missing(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no product of integers")

    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 64), torch.randn(3, MANY, 48)
    expected, here = multiply(layer, rows), are_wrong()
    try:
        for product, is_wrong in ((saturated, True), (missing, True), (right, here)):
            monkeypatch.setattr(torch, "_int_mm", product)
            are_wrong.cache_clear()
            assert are_wrong() is is_wrong
            torch.testing.assert_close(multiply(layer, rows), expected, rtol=1e-6, atol=1e-6)
    finally:
        are_wrong.cache_clear()


def test_a_sum_of_integers_that_may_not_fit_stays_in_float32() -> None:
    layer, rows = nn.Linear(LONGEST_SUM + 1, 1), torch.randn(MANY, LONGEST_SUM + 1)
    torch.testing.assert_close(multiply(layer, rows), stock(layer, rows).detach(), rtol=1e-4, atol=1e-4)
    assert quantized.summary().startswith("0 linear layers")
