"""The Triton kernel of attention to a latent: in Triton's interpreter, compiled for GPUs without one, and on one."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_kit import (
    assert_every_line_runs,
    multiply_bfloat16,
    run_in_the_interpreter,
    run_outside_the_interpreter,
)

from fastgen.bench.soak.modes import default_dtype
from fastgen.cache.slim import latent
from fastgen.cache.slim.latent import InputCache, Projections
from fastgen.layers import attention, attention_kernels
from fastgen.ops.attention import fold_beams

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

HALVES = [torch.float16, torch.bfloat16]
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "batch": st.integers(1, 3),
        "beams": st.integers(1, 6),
        "heads": st.sampled_from([1, 2, 3, 7]),
        "keys": st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 129, 300])),
        "size": st.sampled_from([1, 8, 24, 40, 48, 64, 100, 192]),
        "bias": st.sampled_from([None, "1111", "B1MK", "1H1K", "BHMK", "B11K"]),
        "hidden": st.sampled_from([0.0, 0.5, 1.0]),
        "splits": st.sampled_from([1, 2, 3, 8]),
        "layout": st.sampled_from(["dense", "within", "transposed"]),
        "terms": st.sampled_from([1, 2]),
        "magnitude": st.sampled_from([1e-9, 1.0, 1e6]),  # of the query; float16 ends at 65504
    }
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's module as Triton's interpreter runs it."""
    if "TRITON_INTERPRET" not in os.environ:  # to be set before anybody imports Triton
        pytest.skip("runs inside test_in_the_interpreter")
    from fastgen.ops import triton_latent

    multiply_bfloat16(monkeypatch)
    return triton_latent


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="would start itself")
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def inputs(
    case: dict[str, Any], dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    generator = torch.Generator().manual_seed(case["seed"])
    batch, beams, heads, keys, size = (case[name] for name in ("batch", "beams", "heads", "keys", "size"))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    if case["layout"] == "within":  # of a larger cache, NaN around
        room = torch.full((batch, 1, keys + 5, size), math.nan, dtype=dtype, device=device)
        room[:, :, :keys] = numbers(batch, 1, keys, size).to(dtype)
        latent = room[:, :, :keys]
    else:
        latent = numbers(batch, 1, size, keys).to(dtype).mT
        latent = latent if case["layout"] == "transposed" else latent.contiguous()
    bias = None
    if case["bias"] is not None:
        of = {"1": 1, "B": batch, "H": heads, "M": beams, "K": keys}
        bias = numbers(*(of[letter] for letter in case["bias"])).to(dtype)
        bias[torch.rand(bias.shape, generator=generator).to(device) < case["hidden"]] = -math.inf
    query = numbers(batch * beams, heads, 1, size) * case["magnitude"]
    return query, latent, bias, 0.37 / case["magnitude"]


def check(attend: Callable[..., Tensor], arguments: Any, terms: int, **how: Any) -> None:
    """The result is off by no more than what rounding of the query and the weights explains."""
    query, latent, bias, scale = arguments
    output = attend(*arguments, terms=terms, **how)
    assert output.is_contiguous() and output.dtype == torch.float32
    assert output.shape == (query.shape[0], 1, query.shape[1], query.shape[3])
    query, latent, bias = (None if x is None else x.double() for x in (query, latent, bias))
    folded = fold_beams(query, latent.shape[0], 1)[:, 0]  # [B, H, M, C]
    scores = folded @ latent.mT * scale
    exact = (scores if bias is None else scores + bias).softmax(-1) @ latent  # [B, H, M, C]
    exact = exact.transpose(1, 2).flatten(0, 1)[:, None]
    is_row = exact.isfinite()
    assert output[~is_row].isnan().all(), "a row of -inf alone"
    resolved = torch.finfo(arguments[1].dtype).eps / 2
    off_by = (folded.abs() @ latent.abs().mT * scale).max()  # times the relative error of a query's numbers
    off_by = float(off_by * (resolved if terms == 1 else resolved**2 * 2) + 1e-5)  # of a score
    rounded = 3 * resolved + latent.shape[2] * 2.0**-24  # weights, and those that are subnormal in float16
    allowed = (math.expm1(2 * off_by) + rounded) * float(latent.abs().max())
    errors = (output.double() - exact)[is_row].abs()
    assert float(errors.max() if errors.numel() else 0) <= allowed


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
@example(
    case=dict(
        seed=1,
        batch=2,
        beams=4,
        heads=3,
        keys=300,
        size=192,
        bias="B1MK",
        hidden=0.5,
        splits=3,
        layout="within",
        terms=2,
        magnitude=1e6,
    )
)
@example(
    case=dict(
        seed=2,
        batch=1,
        beams=6,
        heads=7,
        keys=129,
        size=40,
        bias="BHMK",
        hidden=1.0,
        splits=2,
        layout="transposed",
        terms=1,
        magnitude=1.0,
    )
)
def test_attention(interpreted: Any, case: dict[str, Any]) -> None:
    check(interpreted.latent_attention, inputs(case), case["terms"], splits=case["splits"])


def test_the_output_is_float32_whatever_the_default_dtype(interpreted: Any) -> None:
    def attend(*arguments: Any, **options: Any) -> Tensor:
        with default_dtype(torch.bfloat16):
            return interpreted.latent_attention(*arguments, **options)

    case = dict(seed=4, batch=2, beams=3, heads=2, keys=300, size=40, bias="BHMK", hidden=0.0, layout="dense")
    for splits in (1, 3):
        check(attend, inputs(case | dict(magnitude=1.0)), 2, splits=splits)


def test_every_line_runs(interpreted: Any) -> None:
    """And every branch: with a bias and without, one part and several, one term and two, whole chunks and not."""
    cases = [
        {**CASE, "size": size, "bias": bias, "terms": terms, "splits": splits, "batch": splits, "keys": 129, "heads": 3}
        for size, bias, terms, splits in ((48, None, 1, 1), (64, "B1MK", 2, 3))
    ]
    assert_every_line_runs(
        interpreted,
        lambda: [
            check(interpreted.latent_attention, inputs(case, dtype), case["terms"], splits=case["splits"])
            for case in cases
            for dtype in HALVES
        ],
    )


CASE = dict(
    seed=3, batch=2, beams=3, heads=12, keys=70, size=48, bias="B1MK", hidden=0.3, layout="dense", magnitude=1.0
)  # fmt: skip


@pytest.mark.parametrize("spoil", [lambda x: x * 1.01, lambda x: x.roll(1, 0), lambda x: x.roll(1, 2)])
def test_a_wrong_result_is_noticed(interpreted: Any, spoil: Callable[[Tensor], Tensor]) -> None:
    check(interpreted.latent_attention, inputs(CASE), 2)
    with pytest.raises(AssertionError):
        check(lambda *arguments, **how: spoil(interpreted.latent_attention(*arguments, **how)), inputs(CASE), 2)


def test_the_second_term_is_needed_for_its_digits(interpreted: Any) -> None:
    arguments = inputs({**CASE, "bias": None, "magnitude": 1e6})
    arguments = (*arguments[:3], arguments[3] * 20)  # sharp: errors of the scores are what matters
    one_term = functools.partial(interpreted.latent_attention, terms=1)
    with pytest.raises(AssertionError):
        check(lambda *arguments, terms, **how: one_term(*arguments, **how), arguments, 2)
    check(interpreted.latent_attention, arguments, 2)


def test_what_all_keys_have_in_common_is_exact(interpreted: Any) -> None:
    """Rounded weights add up to 1: otherwise their errors would meet what is the same in all keys."""
    query, latent, bias, scale = inputs(CASE)
    latent = latent[:, :, :1].expand_as(latent)
    output = interpreted.latent_attention(query, latent, bias, scale)
    expected = latent[:, 0, :1, None].float().expand(-1, 3, 12, -1).flatten(0, 1)[:, None]
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def test_what_is_not_for_the_kernel(interpreted: Any) -> None:
    query, latent = torch.zeros(4, 6, 1, 32), torch.zeros(2, 1, 9, 32, dtype=torch.float16)
    assert not interpreted.unsupported(query, latent)
    assert interpreted.unsupported(query, latent.float()), "no tensor cores at full precision"
    assert interpreted.unsupported(query.double(), latent)
    assert interpreted.unsupported(query, latent[:, :, :0])
    assert interpreted.unsupported(torch.zeros(4, 6, 1, 5000), torch.zeros(2, 1, 9, 5000, dtype=torch.float16))
    with pytest.raises(ValueError, match="5000 columns"):
        interpreted.latent_attention(torch.zeros(4, 6, 1, 5000), torch.zeros(2, 1, 9, 5000), None, 1.0)


def test_tiles_fit(interpreted: Any) -> None:
    for room in (99 * 1024, 163 * 1024, 227 * 1024):
        for size in (64, 384, 512, 768, 1024, 1280, 2048):
            for terms in interpreted.TERMS:
                tile = interpreted.tile_for(100, size, terms, room)
                assert tile is None or tile.bytes(size, terms) <= room
                assert tile is not None or size * terms > 768
    assert interpreted.tile_for(5, 384, 1, 227 * 1024).rows == 16, "no more rows than there are"


# ------------------------------------------------------------------------------------------------ the compiler
COMPILE = """
import json, pathlib, re, subprocess, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastgen.ops import triton_latent as ours

cuobjdump = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
found = []
for capability, room, size, terms, name, has_bias, is_split in (
    (80, 163, 384, 1, "bf16", True, True),
    (80, 163, 1024, 1, "fp16", True, False),
    (80, 163, 1280, 1, "fp16", False, False),
    (80, 163, 1280, 2, "bf16", True, False),
    (90, 227, 512, 2, "bf16", True, True),
    (90, 227, 768, 1, "fp16", True, False),
    (90, 227, 1024, 1, "fp16", False, False),
    (90, 227, 1280, 1, "fp16", False, False),
    (90, 227, 1280, 1, "bf16", True, True),
    (90, 227, 1280, 2, "bf16", True, False),
):
    tile = ours.tile_for(100, size, terms, 1024 * room)
    constants = dict(SIZE=size, WIDTH=ours._WIDTH, CHUNKS=triton.cdiv(size, ours._WIDTH))
    constants |= dict(ROWS=tile.rows, KEYS=tile.keys, TERMS=terms, HAS_BIAS=has_bias, IS_SPLIT=is_split)
    names = ours._attend.arg_names
    signature = {argument: "i32" for argument in names}
    signature |= {argument: "*fp32" for argument in ("query", "output", "maxima", "sums")}
    signature |= {"latent": f"*{name}", "bias": f"*{name}", "scale": "fp32"}
    signature |= {argument: "constexpr" for argument in constants}
    aligned = "query latent bias output maxima sums query_row query_head latent_batch latent_slot".split()
    compiled = triton.compile(
        ASTSource(
            ours._attend,
            signature=signature,
            constexprs=constants,
            attrs={(names.index(argument),): [["tt.divisibility", 16]] for argument in aligned},  # as when launched
        ),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=ours._WARPS, num_stages=tile.stages, maxnreg=ours._REGISTERS),
    )
    file = pathlib.Path("FOLDER") / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    stack = None
    if cuobjdump.exists():
        usage = subprocess.run([cuobjdump, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\\d+)", usage)[1])
    one = dict(capability=capability, size=size, terms=terms, shared=compiled.metadata.shared)
    found.append(one | dict(room=1024 * room, expected=tile.bytes(size, terms), stack=stack))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiles(tmp_path: Any) -> None:
    """To machine code of two generations of GPUs: within their shared memory, with no register spilled."""
    found = json.loads(run_outside_the_interpreter(COMPILE.replace("FOLDER", str(tmp_path)), tmp_path))
    assert len(found) == 10
    for one in found:
        assert 0 < one["shared"] <= one["expected"] <= one["room"], one
        assert one["stack"] in (0, None), one


# ------------------------------------------------------------------------------------------------ which one is taken
class Layer:
    """An attention module's input cache, and a query, a latent and a bias for it, in half precision."""

    def __init__(self, dtype: torch.dtype = torch.float16, device: str = "cpu", **of: Any) -> None:
        """`of`: the scale of the keys' weights, the score's factor, and how much stronger than the rest the latent is
        in directions that the keys ignore."""
        torch.manual_seed(5)
        heads, size, width, keys, batch, beams = 3, 16, 96, 75, 2, 4
        inputs = torch.randn(batch, keys, width)
        weights = torch.randn(2, heads, size, width) * width**-0.5
        if ignored := of.get("ignored", 0.0):
            directions = torch.linalg.qr(torch.randn(width, 4))[0]
            inputs = inputs + ignored * torch.randn(batch, keys, 4) @ directions.T * width**0.5
            weights = weights - weights @ directions @ directions.T
        key, value = (weights * torch.tensor([of.get("weights", 1.0), 1.0])[:, None, None, None]).to(device, dtype)
        biases = torch.randn(2, heads, size).to(device, dtype)
        self.cache = InputCache(Projections(key, value, *biases))
        self.query = torch.randn(batch * beams, heads, 1, size).to(device, dtype)
        self.stored = (inputs[:, None].to(device, dtype),)
        self.bias = torch.randn(batch, 1, beams, keys).to(device, dtype)
        self.scale = of.get("scale", 0.25)

    def attend(self) -> Tensor:
        return self.cache.attend(self.query, self.stored, self.bias, self.scale)

    def errors(self) -> tuple[float, float]:
        """Largest, against float64: of this attention, and of keys and values of its dtype."""
        doubled = Projections(*(None if x is None else x.double() for x in vars(self.cache.projections).values()))
        query, (inputs,), bias = self.query.double(), (self.stored[0].double(),), self.bias.double()
        exact = attention._plain(query, *doubled.keys_and_values(inputs[:, 0]), bias, self.scale)
        keys, values = self.cache.keys_and_values(self.stored)
        plain = attention._plain(self.query, keys, values, self.bias, self.scale)
        mine, its = (float((output - exact).abs().max()) for output in (self.attend(), plain))
        return mine, its


class Kernels:
    """`triton_latent` as the trials see it: calls by terms, and how many milliseconds each takes; torch's takes 5."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self.milliseconds = 4.0
        self.spoil: Callable[[Tensor], Tensor] = lambda output: output
        self.TERMS, self.unsupported, self._attend = module.TERMS, module.unsupported, module.latent_attention
        monkeypatch.setattr(latent, "may_take_triton", lambda *tensors: not any(x.requires_grad for x in tensors))
        monkeypatch.setattr(attention_kernels, "_kernel", {"triton_latent": self}.get)
        monkeypatch.setattr(attention_kernels, "_milliseconds", self._timed)
        monkeypatch.setattr(attention_kernels, "_verdicts", {})

    def latent_attention(self, *arguments: Any, terms: int) -> Tensor:
        self.calls.append(terms)
        return self.spoil(self._attend(*arguments, terms=terms))

    def _timed(self, attend: Any, *arguments: Any) -> float:
        return 5.0 if attend is latent._attended else self.milliseconds

    def taken(self, layer: Layer) -> int | None:
        """The terms of the kernel that `attend` takes once all has been tried, None for torch's."""
        layer.attend()
        self.calls.clear()
        layer.attend()
        assert len(self.calls) <= 1
        return self.calls[0] if self.calls else None


@pytest.fixture
def kernels(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(interpreted, monkeypatch)


@pytest.mark.parametrize("scale", [0.25, 1.0], ids=["scaled", "as-T5"])
@pytest.mark.parametrize("weights", [1 / 16, 1.0, 4.0, 16.0])
def test_off_by_no_more_than_twice_what_keys_and_values_are(kernels: Kernels, weights: float, scale: float) -> None:
    """A query of one half-precision number is exact enough, whether attention is flat or sharp."""
    layer = Layer(weights=weights, scale=scale)
    assert kernels.taken(layer) == 1
    mine, its = layer.errors()
    assert mine <= 2 * its, (mine, its)


def test_nor_where_the_latent_is_strong_where_keys_ignore_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the query's second term is needed, which the trial finds."""
    layer = Layer(ignored=30.0)
    assert kernels.taken(layer) == 2
    mine, its = layer.errors()
    assert mine <= 2 * its, (mine, its)
    kernels.TERMS = (1,)
    attention_kernels._of_weights.clear()
    assert kernels.taken(layer) is None, "one alone is refused"
    monkeypatch.setattr(attention_kernels.Trial, "is_exact", lambda *_: True)
    attention_kernels._of_weights.clear()
    assert kernels.taken(layer) == 1
    mine, its = layer.errors()
    assert mine > 4 * its, "rightly so"


def test_scores_beyond_float16(kernels: Kernels) -> None:
    """As a T5 in float16 may have them: absorbed, the query is beyond it."""
    layer = Layer(weights=64.0)
    layer.query = layer.query * 1000
    absorbed = torch.einsum("rhd,hdc->rhc", layer.query[:, :, 0].float(), layer.cache.projections.key.float())
    assert absorbed.abs().max() > torch.finfo(torch.float16).max
    layer.scale = 2e-4
    assert kernels.taken(layer) == 1
    mine, its = layer.errors()
    assert mine <= 2 * its, (mine, its)


def test_the_faster_one_is_taken(kernels: Kernels) -> None:
    assert kernels.taken(Layer()) == 1
    attention_kernels._verdicts.clear()
    kernels.milliseconds = 6.0
    assert kernels.taken(Layer()) is None


@pytest.mark.parametrize("spoil", [lambda x: x * 1.01, lambda x: x.roll(1, 0), lambda x: x * math.nan])
def test_never_one_that_is_wrong(kernels: Kernels, spoil: Callable[[Tensor], Tensor]) -> None:
    kernels.spoil = spoil
    assert kernels.taken(Layer()) is None


def test_nor_one_that_fails(kernels: Kernels) -> None:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("out of resources: shared memory")

    kernels.spoil = fail
    assert kernels.taken(Layer()) is None


def test_each_layers_weights_are_tried_and_shapes_timed_once(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(attention_kernels, "_milliseconds", lambda *_: timed.append(1) or len(timed))
    one, other = Layer(), Layer(ignored=30.0)
    assert kernels.taken(one) == 1 and len(timed) == 2
    assert kernels.taken(other) == 2 and len(timed) == 4
    assert kernels.taken(one) == 1 and len(timed) == 4
    one.cache.projections.key.copy_(other.cache.projections.key)
    one.stored = other.stored
    assert kernels.taken(one) == 2, "other weights in the same place"


def test_nothing_is_tried_where_it_may_not(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    expected = layer.attend()
    attention_kernels._of_weights.clear()
    attention_kernels._verdicts.clear()
    kernels.calls.clear()
    is_capturing = [True]
    monkeypatch.setattr(attention_kernels, "_is_capturing", lambda _: is_capturing[0])
    torch.testing.assert_close(layer.attend(), expected, rtol=2e-3, atol=2e-3)
    assert not kernels.calls and not attention_kernels._verdicts, "a graph is captured"
    is_capturing[0] = False
    assert kernels.taken(layer) == 1
    is_capturing[0] = True
    assert kernels.taken(layer) == 1, "once tried, it may be captured"
    is_capturing[0] = False
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.taken(layer) is None
    finally:
        torch.use_deterministic_algorithms(False)
    layer.query.requires_grad_()
    assert kernels.taken(layer) is None
    layer.query.requires_grad_(False)
    layer.cache.threshold = 1e-6
    assert kernels.taken(layer) is None
    layer.cache.threshold = 0.0
    assert kernels.taken(layer) == 1
    assert kernels.taken(Layer(torch.float32)) is None


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@settings(max_examples=200)
@given(case=cases, dtype=st.sampled_from(HALVES), is_automatic=st.booleans())
def test_attention_on_a_gpu(case: dict[str, Any], dtype: torch.dtype, is_automatic: bool) -> None:
    from fastgen.ops import triton_latent

    splits = None if is_automatic else case["splits"]
    check(triton_latent.latent_attention, inputs(case, dtype, "cuda"), case["terms"], splits=splits)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("size", [384, 512, 768, 1024, 1280])
def test_models_sizes_on_a_gpu(size: int, terms: int) -> None:
    from fastgen.ops import triton_latent

    case = {**CASE, "beams": 5, "heads": 20, "keys": 1500, "size": size, "hidden": 0.0}
    for dtype in HALVES:
        check(triton_latent.latent_attention, inputs(case, dtype, "cuda"), terms)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("ignored", [0.0, 30.0])
def test_a_trial_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ignored: float) -> None:
    """Whatever is taken is exact enough, and a graph may hold it once it has been tried."""
    monkeypatch.setattr(attention_kernels, "_verdicts", {})
    layer = Layer(dtype, "cuda", ignored=ignored)
    mine, its = layer.errors()
    assert mine <= 2 * its, (mine, its)
    assert attention_kernels._verdicts, "something was timed"
    expected, tried = layer.attend(), len(attention_kernels._verdicts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.attend()
    output.fill_(math.nan)
    graph.replay()
    assert torch.equal(output, expected) and len(attention_kernels._verdicts) == tried


@pytest.mark.gpu
def test_in_a_graph_on_a_gpu() -> None:
    """The kernel itself, with splits and without."""
    from fastgen.ops import triton_latent

    for splits in (1, 3):
        arguments = inputs({**CASE, "keys": 400, "size": 384}, device="cuda")
        expected = triton_latent.latent_attention(*arguments, splits=splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = triton_latent.latent_attention(*arguments, splits=splits)
        output.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, expected)
