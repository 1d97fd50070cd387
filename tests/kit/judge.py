"""Run one generation on stock fairseq and on fastgen, and compare all that comes out.

`compare` is the only judge: the same hypotheses in the same order, scores, positional scores and attention within
1e-4, the same alignments, and proof from fastgen's own report of what did the work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from both_hosts import configured as configured

import fastgen
from fastgen import report

TOLERANCE = 1e-4
SEED = 123
Hypotheses = list[list[dict[str, Any]]]
Run = Callable[[], Hypotheses]


def stock(run: Run) -> Hypotheses:
    with fastgen.disabled():
        torch.manual_seed(SEED)
        return run()


def ours(run: Run, strict: bool = True) -> tuple[Hypotheses, tuple[report.Call, ...]]:
    """The hypotheses, and the calls that fastgen reported for them."""
    report.reset()
    with configured(strict=strict, history=512):
        torch.manual_seed(SEED)
        result = run()
    return result, report.calls()


def compare(run: Run, reference: Run | None = None, is_fast: bool | None = None) -> Hypotheses:
    """`run` on fastgen, over the tree, must equal `reference` (by default itself) on stock; returns the latter.

    By the host's loop and by ours, where ours can take its place; `is_fast`: whether it must, or must not.
    """
    expected = stock(reference or run)
    result, calls = ours(run)
    assert_over_the_tree(calls)
    assert_same(expected, result)
    with configured(tier="fast"):
        result, calls = ours(run, strict=False)
    tiers = {call.tier for call in calls}
    assert tiers <= {"fast", "compat"} and all((call.tier == "fast") == (call.reason is None) for call in calls), calls
    assert is_fast is None or tiers == {"fast" if is_fast else "compat"}, calls
    assert_same(expected, result)
    return expected


def compare_fallback(run: Run, reason: str, exactly: bool = True) -> None:
    """fastgen must leave `run` to stock, for a reason in which `reason` occurs, and refuse it in strict mode."""
    expected = stock(run)
    result, calls = ours(run, strict=False)
    assert calls, "no call was recorded"
    for call in calls:
        assert (call.host, call.tier) == ("fairseq", "stock"), call
        assert call.reason is not None and reason in call.reason, call.reason
    assert_same(expected, result, exactly)
    try:
        ours(run)
    except fastgen.FallbackError as error:
        assert reason in str(error)
    else:
        raise AssertionError("strict mode let the fallback pass")


def assert_over_the_tree(calls: tuple[report.Call, ...]) -> None:
    assert calls, "fastgen recorded no call: the stock code ran unseen"
    for call in calls:
        assert (call.host, call.tier, call.reason) == ("fairseq", "compat", None), call
        assert call.cache_bytes and call.steps is not None, call


def assert_same(expected: Hypotheses, result: Hypotheses, exactly: bool = False) -> None:
    tolerance = 0.0 if exactly else TOLERANCE
    assert len(expected) == len(result), f"{len(expected)} sentences became {len(result)}"
    for sentence, (theirs, mine) in enumerate(zip(expected, result, strict=True)):
        where = f"sentence {sentence}"
        tokens = [[hypothesis["tokens"].tolist() for hypothesis in side] for side in (theirs, mine)]
        assert tokens[0] == tokens[1], f"{where}: tokens differ\nstock:   {tokens[0]}\nfastgen: {tokens[1]}"
        for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            assert a.keys() == b.keys(), f"{where}: {a.keys()} became {b.keys()}"
            for name in ("score", "positional_scores", "attention"):
                _assert_close(f"{where}, hypothesis {number}: {name}", a.get(name), b.get(name), tolerance)
            soft = isinstance(a.get("alignment"), list)  # attention printed with six digits
            alignments = [_numbers(side["alignment"]) if soft else side.get("alignment") for side in (a, b)]
            _assert_close(f"{where}, hypothesis {number}: alignment", *alignments, tolerance if soft else 0.0)


def _assert_close(name: str, a: Any, b: Any, tolerance: float) -> None:
    if a is None or b is None:
        assert a is b, f"{name}: only one of the two returned any"
        return
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)} became {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{name}: {a.dtype} became {b.dtype}"
    if a.numel():
        assert torch.equal(torch.isfinite(a), torch.isfinite(b)), f"{name}: other values are infinite"
        off = float((a - b).nan_to_num(0.0).abs().max())
        assert off <= tolerance, f"{name}: off by {off:.2e}, beyond the tolerance"


def _numbers(soft: list[list[str]]) -> torch.Tensor:
    return torch.tensor([[float(cell) for cell in row] for row in soft])


def snapshot(sample: dict[str, Any]) -> dict[str, Any]:
    """A copy to see later whether a call has changed its input."""
    return copy.deepcopy(sample)
