"""Half precision: against a float32 reference, fastgen's error is at most twice the stock host's.

Tokens may differ in half precision, and errors can only be compared on equal prefixes. So a processor
replaces the model's scores by fixed ones: every run takes the same path through the tree, beams cross, and
`output_logits` shows what each computed there.
"""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList

from fastgen import report
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.versions import CACHE

STEPS = 12


class Scripted(LogitsProcessor):
    """Scores that depend on the last two tokens only, not on the model."""

    def __init__(self) -> None:
        table = torch.randn(7, zoo.VOCAB, zoo.VOCAB, generator=torch.Generator().manual_seed(0))
        self.table = (table * 2.0).log_softmax(-1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        before = input_ids[:, -2] if input_ids.shape[1] > 1 else torch.zeros_like(input_ids[:, -1])
        return self.table[before % 7, input_ids[:, -1]]


def _scripted() -> LogitsProcessorList:
    return LogitsProcessorList([Scripted()])


OPTIONS: dict[str, Any] = dict(
    num_beams=4, max_new_tokens=STEPS, eos_token_id=None, logits_processor=_scripted,
    return_dict_in_generate=True, output_scores=True, output_logits=True,
)  # fmt: skip


def _errors(reference: Any, output: Any) -> tuple[float, float]:
    """Largest and root-mean-square error of the logits, all steps and beams."""
    assert torch.equal(output.sequences, reference.sequences)
    assert torch.equal(output.beam_indices, reference.beam_indices)
    assert len(output.logits) == len(reference.logits) == STEPS
    difference = torch.stack(output.logits) - torch.stack(reference.logits)
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "llama", "gemma2", "led"])
def test_error_at_most_twice_stocks(name: str, dtype: torch.dtype, tier: str) -> None:
    _check(name, dtype, tier)


def _check(name: str, dtype: torch.dtype, tier: str) -> None:
    inputs = {**zoo.inputs_for(name), **zoo.FAMILIES[name].generate}
    reference = harness.run_stock(zoo.load(name), inputs, **OPTIONS)
    assert zoo.crossings(reference, 4) >= 5
    model = copy.deepcopy(zoo.load(name)).to(dtype)
    inputs = {name: x.to(dtype) if name == "input_features" else x for name, x in inputs.items()}
    stock = harness.run_stock(model, inputs, **OPTIONS)
    output, calls = harness.run_fastgen(model, inputs, tier=tier, **OPTIONS)
    harness.assert_path(calls, tier, "accelerated")
    (stock_worst, stock_mean), (worst, mean) = _errors(reference, stock), _errors(reference, output)
    assert stock_worst > 0, "the reference is no better than what is measured"
    assert worst <= 2 * stock_worst, f"largest error {worst:.3g}, stock's {stock_worst:.3g}"
    assert mean <= 2 * stock_mean, f"mean error {mean:.3g}, stock's {stock_mean:.3g}"


@pytest.mark.skipif(not versions.FINDS_EAGER, reason="this version has no slim caches")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "gpt2", "opt", "marian"])
def test_error_of_slim_caches(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processor of this test edits no weights; with one of a user's no cache is slim.
    monkeypatch.setattr(Request, "calls_back", False)
    with harness.configured(cache="x"):
        _check(name, dtype, "fast")
        call = report.calls()[-1]
    assert "x" in call.cache or "e" in call.cache, call


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_results_have_stock_dtypes(dtype: torch.dtype) -> None:
    model, inputs = copy.deepcopy(zoo.load("bart")).to(dtype), zoo.inputs_for("bart")
    stock = harness.run_stock(model, inputs, **OPTIONS)
    output, _ = harness.run_fastgen(model, inputs, **OPTIONS)
    assert output.sequences_scores.dtype == stock.sequences_scores.dtype
    assert output.scores[0].dtype == stock.scores[0].dtype
    assert output.logits[0].dtype == stock.logits[0].dtype
    mine, theirs = (getattr(run, CACHE).self_attention_cache.layers[0].keys for run in (output, stock))
    assert mine.dtype == theirs.dtype == dtype
