"""Run one request on the stock host and on fastgen, and compare all that comes out.

`compare` is the only judge: same tokens, same beam indices, scores within 1e-4 (and 80 float32 ulps), same
number and shapes of score tensors, and proof from fastgen's own report that the tier asked for did the work.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import zoo
from both_hosts import configured as configured

import fastgen
from fastgen import report
from fastgen.cache import by_model

TOLERANCE = 1e-4
SEED = 123
TIERS = ("fast", "compat")
Generate = Callable[..., Any]


@contextlib.contextmanager
def keeping_prefixes() -> Iterator[None]:
    """Inside the block prefixes are kept, from none on; nothing stays."""
    by_model.release()
    by_model.reset()
    with configured(prefix_cache=2**24):
        yield
    by_model.release()
    by_model.reset()


def request(inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fresh arguments for one run: processors and tensors that a run changes must not reach the next one."""
    return {
        name: value() if name in FACTORIES and inspect.isfunction(value) else copy.deepcopy(value)
        for name, value in {**inputs, **options}.items()
    }


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs for the model in float64."""
    is_float = {name: isinstance(value, torch.Tensor) and value.is_floating_point() for name, value in inputs.items()}
    return {name: value.double() if is_float[name] else value for name, value in inputs.items()}


# These may be given as functions without arguments that build them anew for each run.
FACTORIES = ("logits_processor", "stopping_criteria", "encoder_outputs")


def run_stock(model: Any, inputs: dict[str, Any], generate: Generate = zoo.generate, **options: Any) -> Any:
    with fastgen.disabled():
        torch.manual_seed(SEED)
        return generate(model, request(inputs, options))


def run_fastgen(
    model: Any,
    inputs: dict[str, Any],
    generate: Generate = zoo.generate,
    tier: str = "auto",
    strict: bool = True,
    **options: Any,
) -> tuple[Any, tuple[report.Call, ...]]:
    """The output, and the calls that fastgen reported for it."""
    report.reset()
    with configured(tier=tier, strict=strict, history=64):
        torch.manual_seed(SEED)
        output = generate(model, request(inputs, options))
    return output, report.calls()


def compare(
    model: Any,
    inputs: dict[str, Any],
    tier: str = "auto",
    expected: str = "accelerated",
    generate: Generate = zoo.generate,
    stock: Any = None,
    **options: Any,
) -> Any:
    """Stock and fastgen must agree, and the path must be the `expected` one; returns the stock output."""
    options.setdefault("return_dict_in_generate", True)
    stock = stock if stock is not None else run_stock(model, inputs, generate, **options)
    strict = expected == "accelerated"
    output, calls = run_fastgen(model, inputs, generate, tier=tier, strict=strict, **options)
    try:
        assert_same(stock, output)
    except AssertionError:
        if not _parts_at_near_ties(output, model, inputs, generate, tier, strict, options):
            raise
    assert_path(calls, tier, expected)
    return stock


def _parts_at_near_ties(
    found: Any, model: Any, inputs: dict[str, Any], generate: Generate, tier: str, strict: bool, options: dict[str, Any]
) -> bool:
    """Whether the outputs of a beam search part where stock itself has two candidates within 1e-5, and nowhere else.

    Which way such a tie goes depends on the processor's kernels: a test must not. Told from stock's scores, for
    searches that chose the best of them and ended by token or length. `found`: the output that is not stock's; who
    runs again has to find the same.
    """
    config = model.generation_config
    beams = options.get("num_beams", config.num_beams) or 1
    others = ("do_sample", "stopping_criteria", "logits_processor", "num_beam_groups", "prefix_allowed_tokens_fn")
    if beams < 2 or any(options.get(name) for name in others):
        return False
    ends = options.get("eos_token_id", inputs.get("eos_token_id", config.eos_token_id))
    detailed = {**options, "return_dict_in_generate": True, "output_scores": True}
    stock = run_stock(model, inputs, generate, **detailed)
    output, _ = run_fastgen(model, inputs, generate, tier=tier, strict=strict, **detailed)
    if not torch.equal(*(run if isinstance(run, torch.Tensor) else run.sequences for run in (found, output))):
        return False
    eos = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
    sentences = range(stock.scores[0].shape[0] // beams)
    return all(explain(stock, output, sentence, beams, eos).near_tie for sentence in sentences)


def assert_path(calls: tuple[report.Call, ...], tier: str, expected: str) -> None:
    """The call counters prove which path ran."""
    assert calls, "fastgen recorded no call: the stock code ran unseen"
    for call in calls:
        assert call.host == "transformers"
        if expected == "fallback":
            assert call.tier == "stock" and call.reason, f"expected a reasoned fallback, got {call}"
        elif expected == "rows":
            assert call.tier in TIERS and call.cache == "rows", f"expected rows of the host's cache, got {call}"
        elif tier == "auto":
            assert call.tier in TIERS, f"fell back: {call.reason}"
        else:
            assert call.tier == tier, f"expected the {tier} tier, got {call.tier}: {call.reason}"


# ---------------------------------------------------------------------------------------------- equality
def assert_same(stock: Any, output: Any, tolerance: float = TOLERANCE) -> None:
    if isinstance(stock, torch.Tensor):
        assert isinstance(output, torch.Tensor), f"stock returned a tensor, fastgen {type(output).__name__}"
        _assert_equal("sequences", stock, output)
        return
    assert type(stock) is type(output), f"{type(stock).__name__} became {type(output).__name__}"
    _assert_equal("sequences", stock.sequences, output.sequences)
    _assert_equal("beam_indices", stock.get("beam_indices"), output.get("beam_indices"))
    _assert_close("sequences_scores", stock.get("sequences_scores"), output.get("sequences_scores"), tolerance)
    for name in ("scores", "logits"):
        mine, theirs = output.get(name), stock.get(name)
        assert (mine is None) == (theirs is None), f"{name}: only one of the two returned any"
        if theirs is not None:
            assert len(mine) == len(theirs), f"{name}: {len(theirs)} steps became {len(mine)}"
            for step, (a, b) in enumerate(zip(theirs, mine, strict=True)):
                _assert_close(f"{name}[{step}]", a, b, tolerance)


def _assert_equal(name: str, stock: torch.Tensor | None, output: torch.Tensor | None) -> None:
    if stock is None or output is None:
        assert stock is output, f"{name}: only one of the two returned any"
        return
    assert stock.dtype == output.dtype, f"{name}: dtype {stock.dtype} became {output.dtype}"
    if not torch.equal(stock, output):
        raise AssertionError(f"{name} differ\nstock:   {stock.tolist()}\nfastgen: {output.tolist()}")


def _assert_close(name: str, stock: torch.Tensor | None, output: torch.Tensor | None, tolerance: float) -> None:
    if stock is None or output is None:
        assert stock is output, f"{name}: only one of the two returned any"
        return
    assert stock.shape == output.shape, f"{name}: shape {tuple(stock.shape)} became {tuple(output.shape)}"
    assert stock.dtype == output.dtype, f"{name}: dtype {stock.dtype} became {output.dtype}"
    finite = torch.isfinite(stock)
    assert torch.equal(finite, torch.isfinite(output)), f"{name}: other tokens are banned"
    # Scores grow with negative length penalties, and -1e9 marks what must not be chosen: there, count in ulps.
    allowed = tolerance + 1e-5 * stock.abs()
    error = ((stock - output).abs() - allowed)[finite]
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= 0, f"{name}: {worst:.2e} beyond the tolerance"


# ---------------------------------------------------------------------------------------------- near-ties
@dataclasses.dataclass(frozen=True)
class Divergence:
    sentence: int
    step: int | None  # the first step whose choice differs; None: the same candidates, ranked differently
    gap: float  # between two neighbouring candidates of the stock search there

    @property
    def near_tie(self) -> bool:
        return self.gap < 1e-5


def explain(stock: Any, output: Any, sentence: int, beams: int, eos: tuple[int, ...]) -> Divergence:
    """Where two outputs with scores part for one sentence, and by how little stock itself decided there.

    The stock search is replayed from its own `scores` (end of sentence and length are its only criteria), so
    the gaps are those between the accumulated scores among which it chose.
    """
    rows = slice(sentence * beams, (sentence + 1) * beams)
    steps = min(len(stock.scores), len(output.scores))
    parted = [
        step
        for step in range(steps)
        if not torch.allclose(stock.scores[step][rows], output.scores[step][rows], rtol=0, atol=1e-3)
    ]
    gaps = _selection_gaps([scores[rows] for scores in stock.scores], beams, eos)
    if parted and parted[0] > 0:
        step = parted[0] - 1  # the choice made there brought other rows
        return Divergence(sentence, step, gaps[step])
    returned = stock.sequences_scores.numel() * beams // stock.scores[0].shape[0]
    mine, theirs = (
        run.sequences_scores.view(-1, returned)[sentence].sort(descending=True).values for run in (output, stock)
    )
    return Divergence(sentence, None, float((mine - theirs).abs().max()))


def _selection_gaps(scores: list[torch.Tensor], beams: int, eos: tuple[int, ...]) -> list[float]:
    """At each step the smallest difference between neighbours among the candidates stock kept and the next one."""
    keep = max(2, 1 + len(eos)) * beams
    running = torch.full((beams,), -1e9)
    running[0] = 0.0
    gaps = []
    for step_scores in scores:  # [M, V]
        accumulated = (step_scores + running[:, None]).flatten()
        values, indices = accumulated.topk(keep + 1)
        real = values[values > -1e8]
        gaps.append(float((real[:-1] - real[1:]).min()) if len(real) > 1 else float("inf"))
        ends = torch.isin(indices[:keep] % step_scores.shape[-1], torch.tensor(eos))
        running = (values[:keep] - ends * 1e9).topk(beams).values
    return gaps
