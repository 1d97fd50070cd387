"""The Triton kernel of beam attention: on a CPU by Triton's interpreter, compiled for GPUs without one, and on one."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from references import reference
from torch import Tensor
from triton_kit import (
    assert_every_line_runs,
    multiply_bfloat16,
    run_in_the_interpreter,
    run_outside_the_interpreter,
)

from fastgen.bench.soak.modes import default_dtype
from fastgen.layers import attention, attention_kernels
from fastgen.ops import attention as ops_attention

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "batch": st.integers(1, 3),
        "beams": st.integers(1, 6),
        "key_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 7]),
        "keys": st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 129, 300])),
        "size": st.sampled_from([1, 8, 16, 24, 64]),
        "value_size": st.sampled_from([1, 16, 40]),
        "bias": st.sampled_from([None, "1111", "B1MK", "1H1K", "BHMK", "B11K"]),
        "hidden": st.sampled_from([0.0, 0.5, 1.0]),
        "splits": st.sampled_from([1, 2, 3, 8]),
        "layout": st.sampled_from(["dense", "within", "transposed"]),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    }
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's module as Triton's interpreter runs it."""
    if "TRITON_INTERPRET" not in os.environ:  # to be set before anybody imports Triton
        pytest.skip("runs inside test_in_the_interpreter")
    from fastgen.ops import triton_attention

    multiply_bfloat16(monkeypatch)
    return triton_attention


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="would start itself")
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def inputs(case: dict[str, Any], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(case["seed"])
    batch, beams, key_heads, keys = (case[name] for name in ("batch", "beams", "key_heads", "keys"))
    heads = key_heads * case["group"]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case["dtype"])

    def stored(size: int) -> Tensor:
        if case["layout"] == "within":  # of a larger cache, NaN around
            room = torch.full((batch, key_heads, keys + 5, size), math.nan, dtype=case["dtype"], device=device)
            room[:, :, :keys] = numbers(batch, key_heads, keys, size)
            return room[:, :, :keys]
        x = numbers(batch, key_heads, size, keys).mT
        return x if case["layout"] == "transposed" else x.contiguous()

    bias = None
    if case["bias"] is not None:
        of = {"1": 1, "B": batch, "H": heads, "M": beams, "K": keys}
        bias = numbers(*(of[letter] for letter in case["bias"]))
        bias[torch.rand(bias.shape, generator=generator).to(device) < case["hidden"]] = -math.inf
    query = numbers(batch * beams, heads, 1, case["size"])
    return query, stored(case["size"]), stored(case["value_size"]), bias


def check(attend: Any, arguments: tuple[Tensor, Tensor, Tensor, Tensor | None], splits: int | None) -> None:
    query, key, value, bias = arguments
    output = attend(query, key, value, bias, 0.37, splits=splits)
    assert output.is_contiguous() and output.dtype == query.dtype
    doubles = [x if x is None else x.double() for x in arguments]
    exact = ops_attention.unfold_beams(_softmax(*doubles))
    torch_s = reference.beam_attention(*arguments, 0.37).double() if query.is_cuda else exact
    is_row = exact.isfinite()
    assert output[~is_row].isnan().all(), "a row of -inf alone"
    if query.dtype == torch.float32:
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=2e-6, equal_nan=True)
    elif query.is_cuda:  # off by twice as much as torch's own, or what the dtype resolves
        allowed = 2 * (torch_s - exact)[is_row].abs().max() + torch.finfo(query.dtype).eps
        assert (output.double() - exact)[is_row].abs().max() <= allowed
    else:
        allowed = 4 * torch.finfo(query.dtype).eps
        torch.testing.assert_close(output.double(), exact, rtol=allowed, atol=allowed, equal_nan=True)


def _softmax(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    folded = ops_attention.fold_beams(query, *key.shape[:2])  # [B, Hkv, G, M, D]
    scores = folded @ key[:, :, None].mT * 0.37
    if bias is not None:
        scores = scores + ops_attention._per_group(bias, *folded.shape[1:3])
    return scores.softmax(-1) @ value[:, :, None]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
@example(
    case=dict(
        seed=1,
        batch=2,
        beams=4,
        key_heads=2,
        group=3,
        keys=300,
        size=24,
        value_size=40,
        bias="B1MK",
        hidden=0.5,
        splits=3,
        layout="within",
        dtype=torch.float32,
    )
)
@example(
    case=dict(
        seed=2,
        batch=1,
        beams=5,
        key_heads=1,
        group=7,
        keys=129,
        size=64,
        value_size=16,
        bias="BHMK",
        hidden=1.0,
        splits=2,
        layout="transposed",
        dtype=torch.float16,
    )
)
def test_attention(interpreted: Any, case: dict[str, Any]) -> None:
    check(interpreted.beam_attention, inputs(case), case["splits"])


def test_every_line_runs(interpreted: Any) -> None:
    """And every branch: with a bias and without, one part and several, in each dtype, by one block and by many."""
    of = {"seed": 5, "beams": 3, "group": 2, "keys": 129, "size": 16, "value_size": 24, "layout": "dense"}
    cases = [
        {**of, "batch": batch, "key_heads": batch, "bias": bias, "hidden": 0.5, "splits": splits, "dtype": dtype}
        for batch, splits, bias in ((1, 1, "B1MK"), (2, 3, None))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert_every_line_runs(
        interpreted, lambda: [check(interpreted.beam_attention, inputs(case), case["splits"]) for case in cases]
    )


def test_sums_are_float32_whatever_the_default_dtype(interpreted: Any) -> None:
    """Of parts of the keys, too: bfloat16 would round maxima and sums before they are joined."""

    def attend(*arguments: Any, **options: Any) -> Tensor:
        with default_dtype(torch.bfloat16):
            return interpreted.beam_attention(*arguments, **options)

    case = dict(seed=4, batch=2, beams=3, key_heads=2, group=1, keys=300, size=16, value_size=16, bias="BHMK")
    check(attend, inputs(case | dict(hidden=0.0, layout="dense", dtype=torch.float32)), 3)


@pytest.mark.gpu
@settings(max_examples=200)
@given(case=cases, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), is_automatic=st.booleans())
def test_attention_on_a_gpu(case: dict[str, Any], dtype: torch.dtype, is_automatic: bool) -> None:
    from fastgen.ops import triton_attention

    arguments = inputs({**case, "dtype": dtype}, "cuda")
    check(triton_attention.beam_attention, arguments, None if is_automatic else case["splits"])


def test_what_is_not_for_the_kernel(interpreted: Any) -> None:
    query, key = torch.zeros(4, 6, 1, 32), torch.zeros(2, 3, 9, 32)
    assert not interpreted.unsupported(query, key, key)
    assert interpreted.unsupported(query.double(), key.double(), key.double())
    assert interpreted.unsupported(query, key[:, :, :0], key[:, :, :0])
    assert interpreted.unsupported(torch.zeros(4, 6, 1, 300), torch.zeros(2, 3, 9, 300), key)
    assert interpreted.unsupported(torch.zeros(66, 6, 1, 32), key, key), "66 rows share a key head"


class _OnTheSecond(Tensor):
    """A tensor that says it is on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_kernels_are_launched_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.ops import triton_attention

    entered, launched = [0], []

    @contextlib.contextmanager
    def guard(device: Any) -> Any:
        entered.append(torch.device(device).index)
        yield
        entered.pop()

    def launch(*arguments: Any) -> Any:
        launched.append((arguments[0].device.index, entered[-1]))

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(triton_attention, "_launched", launch)
    monkeypatch.setattr(triton_attention, "splits_for", lambda *_: 2)
    query, key = (torch.zeros(shape).as_subclass(_OnTheSecond) for shape in ((4, 4, 1, 16), (2, 2, 700, 16)))
    triton_attention.beam_attention(query, key, key, None, 1.0)
    assert launched == [(1, 1)] and entered == [0]


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastgen.ops import triton_attention as ours

numbers = dict(SIZE=80, VALUE_SIZE=64, ROWS=32, KEYS=64, PADDED=128, VALUE_PADDED=64, HAS_BIAS=True)
for capability in (80, 90):
    for name in ("fp32", "fp16", "bf16"):
        for is_split in (False, True):
            signature = {argument: "i32" for argument in ours._attend.arg_names}
            signature |= {argument: f"*{name}" for argument in ("query", "key", "value", "bias")}
            signature |= {"maxima": "*fp32", "sums": "*fp32", "scale": "fp32"}
            signature["output"] = "*fp32" if is_split else f"*{name}"
            constants = {**numbers, "IS_SPLIT": is_split}
            signature |= {argument: "constexpr" for argument in constants}
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(ASTSource(ours._attend, signature=signature, constexprs=constants), target=target)
            assert compiled.asm["cubin"]
        signature = {argument: "i32" for argument in ours._join.arg_names}
        signature |= {"parts": "*fp32", "maxima": "*fp32", "sums": "*fp32", "output": f"*{name}"}
        constants = dict(VALUE_SIZE=64, ROWS=32, VALUE_PADDED=64)
        signature |= {argument: "constexpr" for argument in constants}
        compiled = triton.compile(ASTSource(ours._join, signature=signature, constexprs=constants), target=target)
        assert compiled.asm["cubin"]
print("compiled")
"""


def test_compiles(tmp_path: Any) -> None:
    """To machine code of two generations of GPUs, with the assembler that Triton brings."""
    assert run_outside_the_interpreter(COMPILE, tmp_path).strip() == "compiled"


# ------------------------------------------------------------------------------------------------ which one is taken
CASE = dict(
    seed=3, batch=2, beams=3, key_heads=2, group=2, keys=70, size=16, value_size=16, bias="B1MK", hidden=0.3,
    layout="dense", dtype=torch.float32,
)  # fmt: skip


@pytest.fixture
def choose(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether the kernel is taken for `CASE`, if each call of it takes so many milliseconds and torch's takes 5."""

    def chosen(milliseconds: float, spoil: Any = None, **case: Any) -> bool:
        def ours(*arguments: Any) -> Tensor:
            if math.isinf(milliseconds):
                raise RuntimeError("out of resources: shared memory")
            output: Tensor = interpreted.beam_attention(*arguments)
            return output if spoil is None else spoil(output)

        def timed(attend: Any, *arguments: Any) -> float:
            return milliseconds if attend is kernel.beam_attention else 5.0

        kernel = type("kernel", (), {"beam_attention": staticmethod(ours), "unsupported": interpreted.unsupported})
        monkeypatch.setattr(attention_kernels, "_kernel", lambda _: kernel)
        monkeypatch.setattr(attention_kernels, "_milliseconds", timed)
        monkeypatch.setattr(attention_kernels, "_verdicts", {})
        arguments = (*inputs({**CASE, **case}), 0.37, attention._plain)
        first, again = (attention_kernels.kernel_for(*arguments) for _ in range(2))
        assert first is again
        return first is ours

    return chosen


def test_the_faster_one_is_taken(choose: Any) -> None:
    assert choose(4.0) and not choose(6.0)
    assert choose(4.0, hidden=1.0, batch=1) is False, "rows of -inf alone say nothing about exactness"
    assert choose(4.0, bias=None)


def _nan(output: Tensor) -> Tensor:
    output[0] = math.nan
    return output


@pytest.mark.parametrize("spoil", [lambda x: x * 1.001, lambda x: x.roll(1, 0), _nan])
def test_never_one_that_is_wrong(choose: Any, spoil: Any) -> None:
    assert not choose(4.0, spoil)


def test_nor_one_that_fails(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choose(math.inf)
    torch.use_deterministic_algorithms(True)
    try:
        assert not choose(4.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(4.0)
    monkeypatch.setattr(attention_kernels, "_kernel", lambda _: None)
    assert attention_kernels.kernel_for(*inputs(CASE), 0.37, attention._plain) is None


def test_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_kernels._kernel.cache_clear()
    try:
        monkeypatch.setenv("FASTGEN_NATIVE", "0")
        assert attention_kernels._kernel("triton_attention") is None
    finally:
        attention_kernels._kernel.cache_clear()


def test_what_is_captured_is_timed_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the slower launch of a kernel counts for nothing; each way to run has a verdict of its own."""
    monkeypatch.setattr(attention_kernels, "_verdicts", verdicts := {})
    monkeypatch.setattr(attention_kernels, "_milliseconds", lambda kernel, *_: 2.0 if kernel is ours else 1.0)
    monkeypatch.setattr(
        attention_kernels, "_milliseconds_in_a_graph", lambda kernel, *_: 1.0 if kernel is ours else 2.0
    )
    query = torch.zeros(2, 2, 1, 16)

    def ours(*_: Any) -> torch.Tensor:
        return query

    kernel = SimpleNamespace(unsupported=lambda *_: False, beam_attention=ours)
    monkeypatch.setattr(attention_kernels, "_kernel", lambda module: kernel)
    arguments = (query, torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16), None, 1.0)
    for _ in range(2):
        assert attention_kernels.kernel_for(*arguments, lambda *_: query) is None
        with attention_kernels.for_graphs():
            assert attention_kernels.kernel_for(*arguments, lambda *_: query) is ours
    assert len(verdicts) == 2


def test_milliseconds() -> None:
    query = torch.zeros(1)
    assert 1.0 <= attention_kernels._milliseconds(lambda *_: time.sleep(0.001) or query, query) < 100


@pytest.mark.gpu
def test_a_trial_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken, the result is right, and a graph may hold it once it has been tried."""
    monkeypatch.setattr(attention_kernels, "_verdicts", {})
    arguments = inputs({**CASE, "keys": 4000}, "cuda")
    expected = attention._plain(*arguments, 0.37)
    torch.testing.assert_close(attention.beam_attention(*arguments, 0.37), expected)
    assert len(attention_kernels._verdicts) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention.beam_attention(*arguments, 0.37)
    graph.replay()
    torch.testing.assert_close(output, expected)
