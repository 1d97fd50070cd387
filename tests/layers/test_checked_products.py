"""Products of weights that may be edited at any time: a packed copy serves only as long as it is one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D
from weight_edits import EDITS

from fastgen.layers import checked_products, linear, packed_weights
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits
from fastgen.replay.tape import Tape

ROWS = linear._SKINNY_ROWS + 5


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    if not packed_weights.is_native():
        pytest.skip("there is no native operator here")
    packed_weights.release()
    linear._verdicts.clear()
    yield
    packed_weights.release()
    linear._verdicts.clear()


def stock(layer: Any, rows: Tensor) -> Tensor:
    return layer(rows)


def dispatcher(mode: str = "always") -> LinearDispatcher:
    found = LinearDispatcher(mode)
    found.expect_edits()
    return found


def made(bias: bool = True, size: int = 48, width: int = 64, transposed: bool = False) -> Any:
    torch.manual_seed(0)
    return Conv1D(width, size) if transposed else torch.nn.Linear(size, width, bias=bias)


transposes = pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])


@pytest.mark.parametrize(("bias", "transposed"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("width", [48, 64, 100])
@pytest.mark.parametrize("shape", [(ROWS,), (3, ROWS), (1, 40, 2)])
@torch.no_grad()
def test_product(shape: tuple[int, ...], width: int, bias: bool, transposed: bool) -> None:
    layer, products = made(bias, width=width, transposed=transposed), dispatcher()
    rows = torch.randn(*shape, 48)
    output = products(layer, rows, stock, transposed)
    assert torch.allclose(output, stock(layer, rows), atol=1e-5) and output.shape == (*shape, width)
    assert products.count == 1 and packed_weights.count() == 1


@transposes
@pytest.mark.parametrize("change", EDITS)
@torch.no_grad()
def test_an_edit_between_two_products(change: Any, transposed: bool) -> None:
    """By whatever means: the next product is that of the weight as it is, in this call and in the next one."""
    layer, products = made(transposed=transposed), dispatcher()
    rows = torch.randn(ROWS, 48)
    before = products(layer, rows, stock, transposed)
    change(layer)
    for each in (products, products, dispatcher()):
        found = each(layer, rows, stock, transposed)
        assert torch.allclose(found, stock(layer, rows), atol=1e-5)
        assert not torch.allclose(found, before, atol=1e-3)


@transposes
@pytest.mark.parametrize("change", EDITS)
@torch.no_grad()
def test_an_edit_that_is_undone(change: Any, transposed: bool) -> None:
    """The copy is one again."""
    layer, products = made(transposed=transposed), dispatcher()
    rows = torch.randn(ROWS, 48)
    kept = copy.deepcopy(layer.state_dict())
    before = products(layer, rows, stock, transposed)
    change(layer)
    products(layer, rows, stock, transposed)
    layer.load_state_dict(kept)
    assert torch.equal(products(layer, rows, stock, transposed), before)


@transposes
@torch.no_grad()
def test_a_captured_product_looks_at_the_weight(transposed: bool) -> None:
    """A replay calls operators alone."""
    layer, products = made(transposed=transposed), dispatcher()
    rows = torch.randn(ROWS, 48)
    products(layer, rows, stock, transposed)
    tape = Tape()
    captured = tape.capture(lambda: products(layer, rows, stock, transposed), torch.device("cpu"))
    assert torch.equal(tape.replay(), captured)
    layer.weight.data.numpy()[:] *= -1
    assert torch.allclose(tape.replay(), stock(layer, rows), atol=1e-5)
    layer.weight.data.numpy()[:] *= -1
    assert torch.equal(tape.replay(), captured)
    layer.bias.data.add_(1)
    assert torch.allclose(tape.replay(), captured + 1, atol=1e-5)


@torch.no_grad()
def test_a_weight_of_another_shape() -> None:
    layer, products = made(), dispatcher()
    products(layer, torch.randn(ROWS, 48), stock)
    layer.weight.data, layer.bias.data = torch.randn(90, 110), torch.randn(90)
    rows = torch.randn(ROWS, 110)
    assert torch.allclose(products(layer, rows, stock), stock(layer, rows), atol=1e-5)


@torch.no_grad()
def test_the_clock_decides_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def is_faster(product: Any, prepare: Any, weight: Tensor, rows: Tensor, *rest: Any) -> bool:
        assert product is checked_products.multiply
        weights = prepare(weight)
        assert torch.allclose(product(rows, weights, None), rows @ weight.t(), atol=1e-4)
        tried.append(len(rows))
        return len(rows) > 64

    monkeypatch.setattr(linear, "is_faster", is_faster)
    layer, products = made(size=512, width=256), dispatcher("auto")
    for number, is_ours in ((20, False), (30, False), (100, True), (70, True), (20, False)):
        before = products.count
        products(layer, torch.randn(number, 512), stock)
        assert products.count - before == is_ours
    assert tried == [20, 100]
    layer = made(size=512, width=256, transposed=True)
    products(layer, torch.randn(200, 512), stock, True)
    assert tried == [20, 100, 200]


@torch.no_grad()
def test_left_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, products = made(), dispatcher()
    rows = torch.randn(ROWS, 48)
    called: list[Any] = []

    def noted(layer: Any, rows: Tensor) -> Tensor:
        called.append(rows)
        return stock(layer, rows)

    products(layer.double(), rows.double(), noted)
    layer.float()
    monkeypatch.setattr(limits, "may_keep", lambda size, taken: False)
    products(layer, rows, noted)
    assert len(called) == 2 and products.count == 0
