"""Threads that generate at once on one model don't disturb each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from both_hosts import run_together

import fastgen

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

CALLS = 200
BEAMS = (1, 2, 5, 8)


def generating(name: str, sample: dict[str, Any], **options: Any) -> Callable[[], None]:
    expected = judge.stock(lambda: models.generate(name, sample, **options))
    return lambda: judge.assert_same(expected, models.generate(name, sample, **options))


def test_one_model_four_threads() -> None:
    """Different beams on one model; stock itself can't do this with BART."""
    jobs = [
        generating("bart", models.batch([4, 9, 6], seed=seed), beam_size=beams, max_len_b=8)
        for seed, beams in enumerate(BEAMS)
    ]
    with judge.configured(strict=True, history=CALLS):
        fastgen.report.reset()
        run_together(jobs, CALLS // len(BEAMS))
    assert fastgen.status().counters == {"fast": 0, "compat": CALLS, "stock": 0}


def test_plain_forward_passes_beside_it() -> None:
    model, sample = models.load("post-norm"), models.batch()
    inputs = sample["net_input"]
    tokens = inputs["src_tokens"].clamp(min=2)
    with torch.no_grad():
        expected = model(inputs["src_tokens"], inputs["src_lengths"], tokens)[0]

    def forward() -> None:
        with torch.no_grad():
            assert torch.equal(model(inputs["src_tokens"], inputs["src_lengths"], tokens)[0], expected)

    run_together([forward, forward, generating("post-norm", sample), generating("post-norm", sample, beam_size=2)], 10)


def test_switching_off_and_on_while_others_generate() -> None:
    """A call that is under way when fastgen is disabled ends as it began; the next one is stock's."""
    jobs = [generating("post-norm", models.batch(seed=seed), beam_size=seed + 2) for seed in range(3)]

    def switch() -> None:
        for _ in range(4):
            with fastgen.disabled():
                time.sleep(0.003)
            time.sleep(0.003)

    run_together([*jobs, switch], 12)
    assert fastgen.status().enabled
