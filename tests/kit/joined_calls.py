"""Calls of `generate` that decode together, and what stock makes of each."""

from __future__ import annotations

from typing import Any

import harness
import zoo

from fastgen import report
from fastgen.optimizer.transformers.generate import continuous_batch

SHAPES = ((3, 9), (2, 7), (4, 12), (1, 5), (3, 6), (2, 11), (3, 4))  # batch and length of each call
ROWS = 8


def calls_of(family: str, max_new_tokens: int = 16, **options: Any) -> list[dict[str, Any]]:
    """Calls that end at different steps even if none of their sentences does."""
    return [
        {
            **zoo.inputs_for(family, seed=seed, batch=batch, length=length),
            **options,
            "max_new_tokens": max_new_tokens - 2 * (seed % 3),
        }
        for seed, (batch, length) in enumerate(SHAPES)
    ]


def stock_results(model: Any, calls: list[dict[str, Any]]) -> list[Any]:
    return [harness.run_stock(model, call, generate=_own_generate) for call in calls]


def _own_generate(model: Any, inputs: dict[str, Any]) -> Any:
    return model.generate(**inputs)


def refilled(model: Any, calls: list[dict[str, Any]], rows: int = ROWS, strict: bool = True) -> list[Any]:
    report.reset()
    results: list[Any] = [None] * len(calls)
    with harness.configured(strict=strict, history=64):
        for number, result in continuous_batch.run(model, [harness.request(call, {}) for call in calls], rows):
            assert results[number] is None
            results[number] = result
    return results
