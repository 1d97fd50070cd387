"""The plan for a call's caches: what fits, and of that the fastest."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch

from fastgen.cache.slim import planner
from fastgen.cache.slim.latent import Choice
from fastgen.cache.slim.planner import Call, Geometry, Rates

WHISPER_LARGE = Geometry(32, 32, 20, 20, 64, 1280, 1280)
RATES = Rates(
    few_rows=1e11, many_rows=2e11, products=1e11, moved=1e11, bandwidth=3e10, moved_bandwidth=3e10, overhead=3e-5
)


def call(**changes: int) -> Call:
    return Call(**{"batch": 4, "beams": 5, "prompt": 4, "source": 1500, "steps": 100, "itemsize": 4, **changes})


def test_bytes() -> None:
    """Of the source those of the paper, and of the tree 64 steps at once."""
    numbers = planner.predict(WHISPER_LARGE, call(batch=1, itemsize=1), RATES, Choice()).bytes
    slots = 4 + 64 * 5
    assert numbers == 32 * 2 * 1280 * (1500 + slots)
    slim = planner.predict(WHISPER_LARGE, call(batch=1, itemsize=1), RATES, Choice("x", "e")).bytes
    assert slim == 1280 * 1500 + 32 * 1280 * slots
    half = planner.predict(WHISPER_LARGE, call(batch=1, itemsize=1), RATES, Choice("k", "v")).bytes
    assert half == numbers / 2


def test_few_tokens_are_faster_without_keys_of_a_long_source() -> None:
    """What is saved is their projection; what is paid, arithmetic in every step."""
    assert planner.plan(WHISPER_LARGE, call(steps=4), RATES, None).choice == Choice("kv", "e")
    assert planner.plan(WHISPER_LARGE, call(steps=400), RATES, None).choice == Choice()


def test_what_does_not_fit_goes_slim() -> None:
    everything = planner.predict(WHISPER_LARGE, call(), RATES, Choice()).bytes
    plan = planner.plan(WHISPER_LARGE, call(), RATES, everything // 2)
    assert plan.choice == Choice("kv", "e") and "are free" in str(plan)
    plan = planner.plan(WHISPER_LARGE, call(), RATES, 1)
    assert plan.choice == Choice("x", "e"), "the smallest of all, where none fits"
    assert "free" not in str(planner.plan(WHISPER_LARGE, call(), RATES, 10 * everything))


def test_what_was_asked_for() -> None:
    wanted = planner.asked_for("k")
    plan = planner.plan(WHISPER_LARGE, call(), RATES, None, wanted)
    assert plan.choice == wanted == Choice("k", "k")
    assert [cost.kind for cost in plan.others] == ["kv", "e+kv", "x+kv", "x+e"]


def test_rotary_models_are_not_planned_to_store_their_input() -> None:
    rotary = dataclasses.replace(WHISPER_LARGE, cross_attn_layers=0, is_rotary=True)
    assert planner.plan(rotary, call(source=0), RATES, 1).choice == Choice()


def test_determinism_keeps_the_clock_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        plan = planner.plan_on(torch.device("cpu"), torch.float32, WHISPER_LARGE, call(steps=1), "auto")
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan.choice == Choice()


def test_rates_are_timed_once_and_draw_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rates = planner._rates_of(torch.device("cpu"), torch.float32)
    assert all(value > 0 for value in vars(rates).values())
    assert torch.equal(torch.get_rng_state(), before)
    assert planner._rates_of(torch.device("cpu"), torch.float32) is rates
