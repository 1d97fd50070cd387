"""Weights in fewer bits on fairseq: the user's choice, near fairseq's scores, in decoder and encoder."""

from __future__ import annotations

from typing import Any

import fairseq_models as models
import judge
import pytest
import torch

import fastgen
from fastgen.layers import packed_weights

pytestmark = pytest.mark.usefixtures("rounded_weights")


@pytest.mark.parametrize("weights", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "bart"])
def test_scores_are_near_the_hosts(name: str, weights: str) -> None:
    """Those of forced outputs: of outputs that are its own, others may be the best."""
    sample = models.batch()
    prefix = torch.full((4, 5), 7) + torch.arange(4)[:, None]

    def run() -> Any:
        return models.generate(name, sample, prefix=prefix, beam_size=3)

    expected = judge.stock(run)
    with fastgen.configured(weights=weights, packing="always"):
        found, calls = judge.ours(run)
    judge.assert_over_the_tree(calls)
    assert packed_weights.all_rounded() and fastgen.status().quantized
    for one, other in zip(expected, found, strict=True):
        theirs, mine = (each[0]["positional_scores"][:5] for each in (one, other))
        difference = float((theirs - mine).abs().max())
        assert 1e-5 < difference < 0.25 * float(theirs.abs().max())
    again = judge.compare(run)  # with float32 once more
    assert len(again) == len(expected)
