"""On a GPU: every family's tokens are stock's there, with steps as CUDA graphs and without, in three precisions."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import judge, versions
from fastgen.replay import statistics

pytestmark = pytest.mark.gpu

FAMILIES = [*zoo.ACCELERATED, *(zoo.BY_ROWS if versions.PREFILLS else ()), *zoo.HYBRIDS]
BEAMS = dict(num_beams=4, max_new_tokens=16)
OPTIONS: dict[str, dict[str, Any]] = {
    "details": dict(BEAMS, return_dict_in_generate=True, output_scores=True),
    "bans": dict(BEAMS, no_repeat_ngram_size=2, repetition_penalty=1.2, length_penalty=2.0, num_return_sequences=3),
    "several ends": dict(num_beams=3, max_new_tokens=24, eos_token_id=list(range(5, 25, 2)), early_stopping=True),
    "greedy": dict(max_new_tokens=14),
    "samples": dict(do_sample=True, num_return_sequences=3, max_new_tokens=12, temperature=0.8),
    "beams of samples": dict(BEAMS, do_sample=True, top_k=12),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _on_cuda(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cuda", dtype if value.is_floating_point() else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_identical(family: str, graphs: bool, dtype: torch.dtype) -> None:
    described = {**zoo.FAMILIES, **zoo.BY_ROWS, **zoo.HYBRIDS}[family]
    loaded = zoo.load(family)
    model = copy.deepcopy(loaded).to("cuda", dtype)
    inputs = {**described.inputs(loaded), **described.generate}
    inputs = {name: _on_cuda(value, dtype) for name, value in inputs.items()}
    wrong = []
    for name, options in OPTIONS.items():
        wrong += [f"{name}: {why}" for why in _differences(model, inputs, options, graphs)]
    assert not wrong, "\n".join(wrong)
    if graphs and family in zoo.ACCELERATED and versions.COUNTS_IN_TENSORS:
        assert statistics.counts(model).replays > 10, statistics.replayed()


def _differences(model: Any, inputs: dict[str, Any], options: dict[str, Any], graphs: bool) -> list[str]:
    """How fastgen's output differs from stock's, and why it was left to stock; [] if neither."""
    calls: list[report.Call] = []

    def run(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
        torch.manual_seed(harness.SEED)
        return zoo.generate(model, {**harness.request(inputs, options), **more})  # whose processors record

    def stock(**more: Any) -> Any:
        with fastgen.disabled():
            return run(model, inputs, **more)

    def ours(**more: Any) -> Any:
        report.reset()
        with harness.configured(cuda_graphs=graphs, history=64):
            output = run(model, inputs, **more)
        calls.extend(report.calls())
        return output

    def exact(**more: Any) -> Any:
        with fastgen.disabled():
            return run(copy.deepcopy(model).double(), harness.in_float64(inputs), **more)

    half = str(model.dtype).removeprefix("torch.")
    verdict = judge.judged(
        stock, ours, options.get("num_beams", 1), half if half in judge.HALF_TOLERANCE else "", exact
    )
    is_greedy = "num_beams" not in options and "num_return_sequences" not in options
    left = [f"left to stock: {call.reason}" for call in calls[:1] if call.tier == "stock" and (graphs or not is_greedy)]
    return left + ([verdict.why] if verdict.kind == judge.DIFFERENT else [])
