"""Threads that generate at once on one model don't disturb each other, nor anybody's plain forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import both_hosts
import harness
import pytest
import torch
import zoo

import fastgen
from fastgen.optimizer.transformers.interception import redirected
from fastgen.optimizer.transformers.model import session

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

ROUNDS = 4
SEARCHES: list[dict[str, Any]] = [
    dict(num_beams=2, max_new_tokens=14),
    dict(num_beams=5, max_new_tokens=9, num_return_sequences=3),
    dict(num_beams=3, max_new_tokens=12, early_stopping=True, no_repeat_ngram_size=2),
    dict(num_beams=8, max_new_tokens=7, length_penalty=0.2),
    dict(num_beams=1, max_new_tokens=10),
]


def run_together(jobs: list[Callable[[], None]]) -> None:
    both_hosts.run_together([torch.no_grad()(job) for job in jobs], ROUNDS)


def generating(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Callable[[], None]:
    stock = harness.run_stock(model, inputs, **options)

    def job() -> None:
        assert torch.equal(zoo.generate(model, inputs, **options), stock)

    return job


def forward_passes(model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """Plain calls with padding: their masks must not be built for somebody else's decode."""
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": torch.full((3, 4), zoo.START)}
    with fastgen.disabled(), torch.no_grad():
        stock = model(**inputs).logits

    def job() -> None:
        for _ in range(10):
            torch.testing.assert_close(model(**inputs).logits, stock, rtol=0, atol=1e-5)

    return job


@pytest.mark.parametrize("tier", ["auto", "compat"])
@pytest.mark.parametrize("name", ["bart", "bart_eager", "t5", "llama", "gemma2", "trocr", "led"])
def test_one_model_many_threads(name: str, tier: str) -> None:
    model, extra = zoo.load(name), zoo.FAMILIES[name].generate
    jobs = [
        generating(model, {**zoo.inputs_for(name, seed=seed), **extra}, options)
        for seed, options in enumerate(SEARCHES)
    ]
    jobs.append(forward_passes(model, zoo.inputs_for(name, seed=9)))
    with harness.configured(tier=tier, strict=True, history=64):
        fastgen.report.reset()
        run_together(jobs)
    counters = fastgen.status().counters
    assert counters["fast"] + counters["compat"] == ROUNDS * len(SEARCHES)
    assert not counters["stock"]


def test_several_models_at_once() -> None:
    names = ("bart", "t5", "gpt2", "mistral", "whisper")
    jobs = [
        generating(zoo.load(name), {**zoo.inputs_for(name), **zoo.FAMILIES[name].generate}, SEARCHES[2])
        for name in names
    ]
    run_together(jobs)


def test_switching_off_and_on_while_others_generate() -> None:
    """A search that is under way when fastgen is disabled ends as it began; the next one is stock's."""
    model = zoo.load("bart")
    jobs = [generating(model, zoo.inputs_for("bart", seed=seed), SEARCHES[seed]) for seed in range(3)]

    def switch() -> None:
        for _ in range(10):
            with fastgen.disabled():
                time.sleep(0.002)
            time.sleep(0.002)

    run_together([*jobs, switch])
    assert fastgen.status().enabled


def test_fallbacks_beside_accelerated_searches() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    without_cache = dict(num_beams=3, max_new_tokens=8, use_cache=False)
    run_together([generating(model, inputs, SEARCHES[0]), generating(model, inputs, without_cache)])


def test_torchscript_while_another_thread_decodes() -> None:
    """Linear layers are wrapped for all threads then; torch reads a wrapped function's source, and our globals."""
    layer, rows = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with redirected(session._PRODUCTS):
        scripted = torch.jit.script(layer)
    assert torch.equal(scripted(rows), layer(rows))
