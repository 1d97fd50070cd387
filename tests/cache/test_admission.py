"""Caches that a layer may have: by the error of its attention on real activations."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch

from fastgen.cache.slim.accuracy import LIMIT, Sample, judge
from fastgen.cache.slim.latent import Projections


def sample(smallest: float = 1.0, dtype: torch.dtype = torch.float32, size: int = 8) -> Sample:
    """Keys and values whose projections have singular values from 1 down to `smallest`."""
    torch.manual_seed(3)
    heads, width = 4, 32

    def weight() -> torch.Tensor:
        left, right = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (heads * size, width))
        values = torch.logspace(0, torch.tensor(smallest).log10().item(), min(heads * size, width)).double()
        narrow = left[:, : len(values)] * values @ right[:, : len(values)].T
        return narrow.to(dtype).view(heads, size, width)

    biases = torch.randn(heads, size).to(dtype), torch.randn(heads, size).to(dtype)
    projections = Projections(weight(), weight(), *biases)
    inputs, query = torch.randn(2, 9, width).to(dtype), torch.randn(2, heads, 9, size).to(dtype)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    return Sample(projections, inputs, query, torch.zeros(9, 9, dtype=dtype).masked_fill(hidden, -1e4)[None, None], 0.3)


@pytest.mark.parametrize("kind", ["x", "k", "v"])
def test_what_is_well_conditioned_is_admitted(kind: str) -> None:
    verdict = judge(sample(), kind)
    assert verdict.reason is None and verdict.error is not None and verdict.plain_error is not None
    assert verdict.error < 1e-6 and verdict.plain_error < 1e-6
    assert verdict.condition == (None if kind == "x" else pytest.approx(1, rel=1e-3))


@pytest.mark.parametrize("kind", ["k", "v"])
def test_what_is_ill_conditioned_is_refused(kind: str) -> None:
    """With the error and the condition in the reason. Bounds would refuse it much earlier: it is measured."""
    admitted = []
    for smallest in (1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9):
        verdict = judge(sample(smallest), kind)
        assert verdict.error is not None
        admitted.append(verdict.reason is None)
        assert admitted[-1] == (verdict.error <= LIMIT)
        if verdict.reason is not None:
            assert f"{verdict.error:.1e}" in verdict.reason and "condition" in verdict.reason
    assert admitted == sorted(admitted, reverse=True) and admitted[0] and not admitted[-1]


def test_the_input_needs_no_inverse() -> None:
    assert judge(sample(1e-9), "x").reason is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    its = sample(dtype=dtype)
    verdict = judge(its, "x")
    assert verdict.reason is None and verdict.error <= 2 * verdict.plain_error
    assert all("nothing can be inverted" in str(judge(its, kind).reason) for kind in ("k", "v"))


def test_what_does_not_hold_the_input() -> None:
    verdict = judge(sample(size=4), "k")
    assert verdict.error is None and "16 numbers do not hold an input of 32" in str(verdict.reason)


def test_an_input_that_errs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would notice a cache that computes something else."""
    from fastgen.cache.slim.latent import InputCache

    attend = InputCache.attend
    monkeypatch.setattr(InputCache, "attend", lambda self, *rest: attend(self, *rest) * 1.0001)
    assert "with keys by" in str(judge(sample(), "x").reason)
