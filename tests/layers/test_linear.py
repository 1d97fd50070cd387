"""Products of our own: the same as stock's, and never those of a weight that has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weight_edits import EDITS, IN_PLACE, in_place

from fastgen.layers import linear, packed_weights, precision, timing
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits

SHAPES = [(1, 1), (7, 3), (64, 48), (33, 257), (1000, 130)]


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    packed_weights.release()
    linear._verdicts.clear()
    yield
    packed_weights.release()
    linear._verdicts.clear()


@pytest.fixture(autouse=True, params=["packed", "oneDNN", "skinny"])
def kind(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """How all products of the test are done that stock does not do."""
    if request.param == "oneDNN":
        monkeypatch.setattr(packed_weights, "_native", lambda: None)
    elif linear._skinny() is None:
        pytest.skip("there is no native operator here")
    packed_weights.unavailable.cache_clear()
    if (why := packed_weights.unavailable()) is not None:
        pytest.skip(f"no packed products here: {why}")
    monkeypatch.setattr(linear, "_SKINNY_ROWS", 100 if request.param == "skinny" else 0)
    yield request.param
    packed_weights.unavailable.cache_clear()


packed_only = pytest.mark.parametrize("kind", ["packed", "oneDNN"], indirect=True)


def stock(layer: Any, rows: Any) -> Any:
    return torch.nn.functional.linear(rows, layer.weight, layer.bias)


@torch.no_grad()
def multiply(layer: Any, rows: Any, mode: str = "always") -> tuple[Any, int]:
    """The product, and how many products stock did not do."""
    decode = LinearDispatcher(mode)
    return decode(layer, rows, stock), decode.count


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [(1,), (5, 1), (2, 3, 4)])
@torch.no_grad()
def test_product(kind: str, shape: tuple[int, int], rows: tuple[int, ...], bias: bool) -> None:
    """As far from float64 as stock at most twice, on rows of any layout."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0], bias=bias)
    for x in (torch.randn(*rows, shape[1]), torch.randn(shape[1], *rows).permute(*range(1, len(rows) + 1), 0)):
        output, ours = multiply(layer, x)
        exact = stock(copy.deepcopy(layer).double(), x.double())
        theirs = (stock(layer, x) - exact).abs().max()
        assert ours == 1 and output.shape == exact.shape
        assert (output - exact).abs().max() <= 2 * theirs + 1e-6
    assert packed_weights.count() == (kind != "skinny")


@packed_only
@torch.no_grad()
def test_transposed() -> None:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(48, 64))
    layer.bias = torch.nn.Parameter(torch.randn(64))
    rows = torch.randn(3, 48)
    output = LinearDispatcher("always")(layer, rows, stock, transposed=True)
    torch.testing.assert_close(output, torch.addmm(layer.bias, rows, layer.weight))


@pytest.mark.parametrize("change", EDITS)
def test_a_changed_weight(change: Any) -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    before, _ = multiply(layer, rows)
    change(layer)
    output, ours = multiply(layer, rows)
    with torch.no_grad():
        torch.testing.assert_close(output, stock(layer, rows))
    assert ours == 1 and not torch.equal(before, output)


@packed_only
def test_an_unchanged_weight_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    multiply(layer, rows)
    monkeypatch.setattr(packed_weights, "pack", None)
    assert multiply(layer, rows)[1] == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["double", "bfloat16", "grad", "subclass", "no weight", "autocast", "inference", "sparse"]
)
def test_left_to_stock(case: str) -> None:
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    if case in ("double", "bfloat16"):
        layer, rows = layer.to(getattr(torch, case)), rows.to(getattr(torch, case))
    if case == "subclass":
        layer.weight = type("Quantised", (torch.nn.Parameter,), {})(layer.weight.data)
    if case == "no weight":  # a parametrised weight is computed at each access
        torch.nn.utils.parametrizations.weight_norm(layer)
    if case == "sparse":
        layer.weight = torch.nn.Parameter(layer.weight.to_sparse_csr())
    if case == "inference":
        with torch.inference_mode():
            layer = torch.nn.Linear(48, 64)
    decode = LinearDispatcher("always")
    with torch.set_grad_enabled(case == "grad"), torch.autocast("cpu", enabled=case == "autocast"):
        decode(layer, rows, stock)
    assert decode.count == 0 and packed_weights.count() == 0


def test_the_random_stream_is_left_alone() -> None:
    layer, rows = torch.nn.Linear(256, 256), torch.randn(4, 256)
    packed_weights.unavailable.cache_clear()
    before = torch.get_rng_state()
    multiply(layer, rows, "auto")
    assert torch.equal(torch.get_rng_state(), before)


def test_modes() -> None:
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    assert multiply(layer, rows, "off")[1] == 0
    assert multiply(layer, rows, "auto")[1] == 0  # too small to pay


@pytest.mark.parametrize("pays", [True, False])
def test_the_quicker_one_is_kept(kind: str, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of the trial is right, and each shape is decided once for all its layers."""
    clock = [0.0]
    torchs = torch.nn.functional.linear
    product: Any = packed_weights.multiply if kind != "skinny" else linear._skinny()
    monkeypatch.setattr(linear, "_skinny", lambda: slow if kind == "skinny" else None)

    def slow(rows: Any, weights: Any, bias: Any) -> Any:
        clock[0] += 1.0 if pays else 3.0
        return product(rows, weights, bias)

    def timed_linear(*arguments: Any) -> Any:
        clock[0] += 2.0
        return torchs(*arguments)

    monkeypatch.setattr(packed_weights, "multiply", slow)
    monkeypatch.setattr(linear.nn.functional, "linear", timed_linear)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
    rows = torch.randn(4, 256)
    decode = LinearDispatcher("auto")
    with torch.no_grad():
        for _ in range(10):
            for layer in model:
                torch.testing.assert_close(decode(layer, rows, stock), stock(layer, rows))
    assert packed_weights.count() == (2 if pays and kind != "skinny" else 0)
    assert decode.count == (20 if pays else 0)
    assert set(linear._verdicts.values()) == {pays}
    assert len(linear._verdicts) == (2 if kind == "skinny" and not pays else 1)


def test_deterministic_algorithms_leave_the_clock_out() -> None:
    layer, rows = torch.nn.Linear(256, 256), torch.randn(4, 256)
    torch.use_deterministic_algorithms(True)
    try:
        assert multiply(layer, rows, "auto")[1] == 0 and not linear._verdicts
    finally:
        torch.use_deterministic_algorithms(False)


@packed_only
def test_no_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(weight: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert packed_weights.unavailable() is None
    monkeypatch.setattr(packed_weights, "pack", fail)
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    output, packed = multiply(layer, rows)
    assert packed == 0 and torch.equal(output, stock(layer, rows))


@packed_only
def test_nothing_is_packed_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free", lambda: 48 * 64 * 4 * limits._SHARE - 1)
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    assert multiply(layer, rows)[1] == 0 and packed_weights.nbytes() == 0
    free = limits.free
    monkeypatch.undo()
    assert free() and (limits.free() or 2**40) > 2**20


def test_no_trial_where_memory_is_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is copied for it; and it is made later, when there is more."""
    tried: list[Any] = []
    monkeypatch.setattr(linear, "is_faster", lambda *args: bool(tried.append(args)) or False)
    layer, rows = torch.nn.Linear(512, 512), torch.randn(4, 512)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "free", lambda: 4 * layer.weight.nbytes - 1)
        assert multiply(layer, rows, "auto")[1] == 0 and not tried
    multiply(layer, rows, "auto")
    assert tried


@packed_only
def test_copies_go_when_the_layer_is_moved_to_another_dtype() -> None:
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    multiply(layer, rows)
    assert packed_weights.nbytes()
    layer.bfloat16()
    output, count = multiply(layer, rows.bfloat16())
    assert count == 0 and packed_weights.nbytes() == 0 and output.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "setting, has_tf32, ours", [("medium", False, 0), ("high", True, 0), ("high", False, 1), ("highest", True, 1)]
)
def test_products_that_the_user_lets_round_are_stocks(
    setting: str, has_tf32: bool, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting == "high" and not precision._by_library():
        pytest.skip("this torch has no TF32 on a CPU")
    monkeypatch.setattr(precision, "_is_tf32_possible", lambda: has_tf32)  # as some processors say
    layer, rows = torch.nn.Linear(48, 64), torch.randn(4, 48)
    known = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        output, count = multiply(layer, rows)
        assert count == ours
        torch.testing.assert_close(output, stock(layer, rows))
    finally:
        torch.set_float32_matmul_precision(known)
    assert multiply(layer, rows)[1] == 1


@packed_only
def test_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "pack", lambda weight: SimpleNamespace().missing)
    monkeypatch.setattr(packed_weights, "_native", lambda: None)
    packed_weights.unavailable.cache_clear()
    try:
        assert "no packed products" in (packed_weights.unavailable() or "")
        assert multiply(torch.nn.Linear(48, 64), torch.randn(4, 48))[1] == 0
    finally:
        monkeypatch.undo()
        packed_weights.unavailable.cache_clear()


@packed_only
def test_a_copy_goes_with_its_layer() -> None:
    layer = torch.nn.Linear(48, 64)
    multiply(layer, torch.randn(4, 48))
    assert packed_weights.nbytes() == 48 * 64 * 4
    del layer
    assert packed_weights.nbytes() == 0


# ---------------------------------------------------------------------------------------------- siblings
class Block(torch.nn.Module):
    """Three projections of one input, two of another, one by itself."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict(q=(32, 48), k=(32, 16), v=(32, 16), out=(80, 32), gate=(32, 64), up=(32, 64))
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(*size, bias=name in "qvo"))

    def run(self, x: Any, call: Any) -> list[Any]:
        outputs = [call(layer, x) for layer in (self.q, self.k, self.v)]
        hidden = call(self.out, torch.cat(outputs, dim=-1))
        return [*outputs, hidden, call(self.gate, hidden), call(self.up, hidden)]


@pytest.fixture
def block() -> Block:
    torch.manual_seed(1)
    return Block()


def _calls(decode: LinearDispatcher) -> Any:
    return lambda layer, x: decode(layer, x, stock)


def _same(block: Block, x: Any, outputs: list[Any]) -> None:
    for theirs, mine in zip(block.run(x, stock), outputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def widths(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of outputs of each product that was computed."""
    found: list[int] = []
    product: Any = packed_weights.multiply if kind != "skinny" else linear._skinny()

    def counted(rows: Any, weights: Any, bias: Any) -> Any:
        output = product(rows, weights, bias)
        found.append(output.shape[-1])
        return output

    monkeypatch.setattr(packed_weights, "multiply", counted)
    monkeypatch.setattr(linear, "_skinny", lambda: counted)
    return found


@torch.no_grad()
def test_siblings_share_a_product_from_the_second_step_on(kind: str, block: Block, widths: list[int]) -> None:
    decode, rows = LinearDispatcher("always"), torch.randn(3, 5, 1, 32)
    for step, x in enumerate(rows):
        widths.clear()
        _same(block, x, block.run(x, _calls(decode)))
        assert widths == ([48, 16, 16, 32, 64, 64] if step == 0 else [80, 32, 128])
    assert decode.count == 3 * 6
    # for other numbers of rows too
    widths.clear()
    x = torch.randn(2, 32)
    _same(block, x, block.run(x, _calls(decode)))
    assert widths == [80, 32, 128]
    if kind == "skinny":
        assert packed_weights.count() == packed_weights.nbytes() == 0
        return
    # and the next call, which finds the copies
    widths.clear()
    _same(block, x, block.run(x, _calls(LinearDispatcher("always"))))
    assert widths == [80, 32, 128]
    assert packed_weights.count() == 6
    panel = 64 if kind == "packed" else 1  # outputs that a copy is filled up to
    assert packed_weights.nbytes() == sum(
        -(-out // panel) * panel * size * 4 for out, size in [(80, 32), (32, 80), (128, 32)]
    )
    packed_weights.release()
    assert packed_weights.count() == packed_weights.nbytes() == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["q", "v", "up"])
def test_a_changed_sibling(block: Block, name: str) -> None:
    x = torch.randn(4, 32)
    for change in (None, in_place, _replaced_data):
        if change is not None:
            change(getattr(block, name))
        decode = LinearDispatcher("always")
        for _ in range(3):
            _same(block, x, block.run(x.clone(), _calls(decode)))


def _replaced_data(layer: Any) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


@torch.no_grad()
def test_an_input_written_to_in_between(block: Block) -> None:
    call = _calls(LinearDispatcher("always"))
    for _ in range(3):
        x = torch.randn(4, 32)
        before = call(block.q, x)
        torch.testing.assert_close(before, stock(block.q, x))
        x.mul_(2)
        torch.testing.assert_close(call(block.k, x), stock(block.k, x))
        torch.testing.assert_close(call(block.v, x), stock(block.v, x))


@torch.no_grad()
def test_siblings_that_part(kind: str, block: Block, widths: list[int]) -> None:
    """Once a joint product was for nothing, each layer goes its own way."""
    decode = LinearDispatcher("always")
    call = _calls(decode)
    for _ in range(2):
        x = torch.randn(4, 32)
        _same(block, x, block.run(x, call))
    for _ in range(4):
        widths.clear()
        x = torch.randn(4, 32)
        torch.testing.assert_close(call(block.q, x), stock(block.q, x))
        hidden = call(block.out, torch.randn(4, 80))
        torch.testing.assert_close(call(block.gate, hidden), stock(block.gate, hidden))
        torch.testing.assert_close(call(block.up, hidden), stock(block.up, hidden))
    assert widths[0] == 48
    _same(block, x, block.run(x, call))
    assert packed_weights.count() == (6 if kind != "skinny" else 0)


def test_siblings_in_inference_mode(block: Block, widths: list[int]) -> None:
    """Its tensors don't tell whether they were written to, so nothing is shared."""
    with torch.inference_mode():
        decode = LinearDispatcher("always")
        for x in torch.randn(3, 4, 32):
            widths.clear()
            _same(block, x, block.run(x, _calls(decode)))
            assert widths == [48, 16, 16, 32, 64, 64]


@torch.no_grad()
@packed_only
def test_siblings_without_memory(block: Block, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LinearDispatcher("always")
    x = torch.randn(4, 32)
    monkeypatch.setattr(packed_weights, "join", lambda siblings: False)
    for _ in range(3):
        widths.clear()
        _same(block, x, block.run(x.clone(), _calls(decode)))
    assert widths == [48, 16, 16, 32, 64, 64]


@torch.no_grad()
@packed_only
def test_siblings_whose_weights_cannot_be_put_together(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    cat, failed = torch.cat, []

    def fail(tensors: Any, dim: int = 0) -> Any:
        if dim == 0:
            failed.append(tensors)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return cat(tensors, dim=dim)

    decode, x = LinearDispatcher("always"), torch.randn(4, 32)
    monkeypatch.setattr(torch, "cat", fail)
    for _ in range(3):
        _same(block, x, block.run(x.clone(), _calls(decode)))
    assert failed


@packed_only
@torch.no_grad()
def test_copies_and_weights_as_they_are_in_one_call(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt has many rows, the steps after it few: siblings are joined for either."""
    if (skinny := linear._skinny()) is None:
        pytest.skip("there is no native operator here")
    done: list[tuple[str, int]] = []

    def counted(name: str, product: Any) -> Any:
        def multiply(rows: Any, weights: Any, bias: Any) -> Any:
            done.append((name, len(rows)))
            return product(rows, weights, bias)

        return multiply

    monkeypatch.setattr(linear, "_SKINNY_ROWS", 4)
    monkeypatch.setattr(packed_weights, "multiply", counted("packed", packed_weights.multiply))
    counted_skinny = counted("skinny", skinny)
    monkeypatch.setattr(linear, "_skinny", lambda: counted_skinny)
    decode = LinearDispatcher("always")
    for rows in (9, 9, 3, 3, 9, 3):
        x = torch.randn(rows, 32)
        _same(block, x, block.run(x, _calls(decode)))
    steps = [("packed", 9, 6), ("packed", 9, 3), ("skinny", 3, 6), ("skinny", 3, 3), ("packed", 9, 3), ("skinny", 3, 3)]
    assert done == [(name, rows) for name, rows, count in steps for _ in range(count)]
    assert packed_weights.count() == 6


# ---------------------------------------------------------------------------------------------- halves
skinny_only = pytest.mark.parametrize("kind", ["skinny"], indirect=True)


@pytest.fixture(params=packed_weights.HALVES, ids=str)
def half(request: Any) -> Any:
    return request.param


def of_halves(half: torch.dtype, size: int = 80, width: int = 70) -> Any:
    """A layer in float32 as models are that were published in 16 bits."""
    torch.manual_seed(size)
    layer = torch.nn.Linear(size, width)
    if half == torch.bfloat16:
        layer.weight.data[1, 1] = 1e-30  # too small for float16
    return layer.to(half).float()


@pytest.fixture
def read(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.dtype]]:
    """The dtypes of the weights that each product reads."""
    found: list[list[torch.dtype]] = []
    product: Any = linear._skinny()

    def counted(rows: Any, weights: Any, bias: Any) -> Any:
        found.append([weight.dtype for weight in weights])
        return product(rows, weights, bias)

    monkeypatch.setattr(linear, "_skinny", lambda: counted)
    return found


@skinny_only
@torch.no_grad()
def test_weights_that_are_halves_are_read_as_such(half: torch.dtype, read: list[list[torch.dtype]]) -> None:
    layer, rows = of_halves(half), torch.randn(5, 1, 80)
    output, ours = multiply(layer, rows)
    assert ours == 1 and read == [[half]]
    assert torch.equal(output, torch.ops.fastgen.skinny_linear(rows, [layer.weight], layer.bias)), "to the last digit"
    assert packed_weights.count() == 1 and packed_weights.nbytes() == layer.weight.nbytes // 2
    multiply(layer, rows)
    assert packed_weights.count() == 1 and len(read) == 2


@skinny_only
@pytest.mark.parametrize("place", [0, 70 * 80 - 1])
@pytest.mark.parametrize("value", [1.0001, 1e-9, 70001.0, float("nan")])
@torch.no_grad()
def test_one_other_number_is_enough_for_float32(
    half: torch.dtype, place: int, value: float, read: list[list[torch.dtype]]
) -> None:
    layer, rows = of_halves(half), torch.randn(2, 80)
    layer.weight.view(-1)[place] = value
    for _ in range(2):
        output, _ = multiply(layer, rows)
        torch.testing.assert_close(output, stock(layer, rows), equal_nan=True)
    assert read == [[torch.float32]] * 2 and packed_weights.count() == 0


@skinny_only
@pytest.mark.parametrize("change", IN_PLACE)
def test_changed_halves(half: torch.dtype, change: Any, read: list[list[torch.dtype]]) -> None:
    layer, rows = of_halves(half, 48, 64), torch.randn(3, 48)
    multiply(layer, rows)
    change(layer)
    with torch.no_grad():
        output, _ = multiply(layer, rows)
        torch.testing.assert_close(output, stock(layer, rows))
    assert read[0] == [half]


@skinny_only
@torch.no_grad()
def test_halves_where_memory_is_short_or_the_clock_against_them(
    half: torch.dtype, read: list[list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = of_halves(half, 512, 512), torch.randn(2, 512)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "free", lambda: 1000)
        multiply(layer, rows)
    assert read == [[torch.float32]] and packed_weights.count() == 0
    for pays in (False, True):
        linear._verdicts.clear()
        # Against stock it always pays here.
        monkeypatch.setattr(linear, "is_faster", lambda *args, pays=pays: pays or args[-1] is None)
        multiply(layer, rows, "auto")
        assert read[-1] == [half if pays else torch.float32]


@skinny_only
@torch.no_grad()
def test_packed_copies_give_way_to_halves(
    half: torch.dtype, read: list[list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is read first, with many rows; but steps gain more by a copy."""
    layer, many, few = of_halves(half, 512, 512), torch.randn(40, 512), torch.randn(3, 512)
    monkeypatch.setattr(linear, "_SKINNY_ROWS", 12)
    monkeypatch.setattr(limits, "free", lambda: 4.5 * 2**20)  # of which copies may take a quarter
    for _ in range(2):
        torch.testing.assert_close(multiply(layer, many)[0], stock(layer, many))
        assert len(packed_weights._copies) == int(not read)
        torch.testing.assert_close(multiply(layer, few)[0], stock(layer, few))
        assert not packed_weights._copies and len(packed_weights._halves) == 1
    assert read == [[half]] * 2


@skinny_only
@torch.no_grad()
def test_packed_copies_stay_where_halves_would_not_fit_without_them(
    half: torch.dtype, read: list[list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = torch.nn.Linear(128, 512), of_halves(half, 1024, 1024)
    monkeypatch.setattr(linear, "_SKINNY_ROWS", 12)
    monkeypatch.setattr(limits, "free", lambda: 4.5 * 2**20)
    multiply(small, torch.randn(40, 128))
    multiply(large, torch.randn(3, 1024))
    assert len(packed_weights._copies) == 1 and not packed_weights._halves and read == [[torch.float32]]


@pytest.mark.parametrize("change", [lambda layer: layer.to("meta"), lambda layer: layer.__delattr__("weight")])
@torch.no_grad()
def test_what_becomes_of_other_layers_is_none_of_their_business(change: Any) -> None:
    layer, other = of_halves(torch.bfloat16, 80, 70), of_halves(torch.bfloat16, 80, 71)
    multiply(layer, torch.randn(40, 80))
    change(layer)
    for rows in (torch.randn(40, 80), torch.randn(3, 80)):
        torch.testing.assert_close(multiply(other, rows)[0], stock(other, rows))


@skinny_only
@torch.no_grad()
def test_siblings_of_which_some_are_halves(half: torch.dtype, read: list[list[torch.dtype]]) -> None:
    torch.manual_seed(0)
    layers, decode = (
        [of_halves(half, 48, 64), torch.nn.Linear(48, 64), of_halves(half, 48, 8)],
        LinearDispatcher("always"),
    )
    for _ in range(3):
        rows = torch.randn(4, 48)
        for layer in layers:
            torch.testing.assert_close(decode(layer, rows, stock), stock(layer, rows))
    assert read[-1] == [half, torch.float32, half]


# ---------------------------------------------------------------------------------------------- screening
def _watched(layer: Any, rows: Any, mode: str = "always") -> LinearDispatcher:
    """Products that were asked for the layer's best output alone."""
    decode = LinearDispatcher(mode)
    decode.track_output(layer)
    assert decode.screen(decode(layer, rows, stock))
    return decode


@skinny_only
@torch.no_grad()
def test_screened_products(read: list[list[torch.dtype]]) -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(128, 4000), torch.randn(2, 128)
    decode = _watched(layer, rows)
    read.clear()
    for _ in range(2):
        rows = torch.randn(2, 128)
        output, whole = decode(layer, rows, stock), stock(layer, rows)
        assert torch.equal(output.argmax(-1), whole.argmax(-1)) and (output == -torch.inf).sum() > 7000
    assert not read and packed_weights.count() == 1 and 0.25 < packed_weights.nbytes() / layer.weight.nbytes < 0.3
    assert torch.equal(LinearDispatcher("always")(layer, rows, stock).argmax(-1), whole.argmax(-1)) and len(read) == 1


@torch.no_grad()
def test_only_products_that_are_the_logits_are_screened() -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(32, 500), torch.randn(2, 32)
    decode = LinearDispatcher("always")
    assert not decode.screen(decode(layer, rows, stock)), "not watched"
    decode.track_output(layer)
    product = decode(layer, rows, stock)
    assert not decode.screen(product + torch.arange(500) * 1e-3)
    assert not decode.screen(product), "forgotten since"
    decode(layer, rows, stock)
    assert not decode.screen(product[:1])
    assert (decode(layer, rows, stock) > -torch.inf).all()


@skinny_only
@pytest.mark.parametrize("change", IN_PLACE)
def test_changed_screened_weights(change: Any) -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(48, 64), torch.randn(3, 48)
    with torch.no_grad():
        before = _watched(layer, rows)
        before(layer, rows, stock)
        assert before.are_current(LinearDispatcher("always"))
    change(layer)
    with torch.no_grad():
        output = _watched(layer, rows)(layer, rows, stock)
        assert torch.equal(output.argmax(-1), stock(layer, rows).argmax(-1))
        assert not before.are_current(LinearDispatcher("always"))


@skinny_only
@torch.no_grad()
def test_screening_where_memory_is_short_or_the_clock_against_it(
    read: list[list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = torch.nn.Linear(512, 512), torch.randn(2, 512)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "free", lambda: 1000)
        assert (_watched(layer, rows)(layer, rows, stock) > -torch.inf).all() and packed_weights.count() == 0
    for pays in (False, True):
        linear._verdicts.clear()
        monkeypatch.setattr(linear, "is_faster", lambda *args, pays=pays: pays or args[-1] is None)
        output = _watched(layer, rows, "auto")(layer, rows, stock)
        assert bool((output == -torch.inf).any()) is pays
