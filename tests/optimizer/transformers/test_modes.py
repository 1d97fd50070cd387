"""Ambient modes: whatever is around a call, fastgen's output is what the stock host's is under the same mode.

The product of families, searches, sentences, lengths and modes is large, so a sample of it is run, drawn anew from
FASTGEN_TEST_MODES (a seed, 0 by default); FASTGEN_TEST_MODES=all runs the whole product.

What is claimed: in float32 and float64 the same tokens, but for choices where stock itself has a near-tie of 1e-5, and
scores within 1e-4, or at most twice as far from stock's in float64 as stock's own; under autocast the logits
of the same tokens, within the precision's tolerance (see `judge`).
Where acceleration is claimed the call is strict; elsewhere it may fall back, with a reason.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen import report
from fastgen.bench.soak.modes import ACCELERATED, FALLBACK, MODES, CountingFunctions, CountingOperators, Mode
from fastgen.optimizer.transformers import judge

ASKED = os.environ.get("FASTGEN_TEST_MODES", "0")
COUNT = 60  # of a sample
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1, "do_sample": False},
    "samples": {"num_beams": 1, "do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "beams": {"num_beams": 4, "do_sample": False},
    "sampled_beams": {"num_beams": 3, "do_sample": True, "top_k": 20},
}


class Case(NamedTuple):
    family: str
    search: str
    sentences: int
    tokens: int
    mode: str


DIMENSIONS: dict[str, list[Any]] = {
    "family": list(zoo.FAMILIES),
    "search": list(SEARCHES),
    "sentences": [1, 3],
    "tokens": [8, 40],  # the models have 64 positions, and inputs up to 9 tokens
    "mode": [name for name in MODES if name != "compiled_caller"],  # minutes for each case
}
PRODUCT = [Case(*values) for values in itertools.product(*DIMENSIONS.values())]


def sample(seed: str, count: int = COUNT) -> list[Case]:
    """`count` cases; each value of each dimension is in one at least."""
    draw = random.Random(f"modes-{seed}")
    columns = []
    for values in DIMENSIONS.values():
        column = [values[place % len(values)] for place in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return [Case(*values) for values in zip(*columns, strict=True)]


def _asked() -> list[Case]:
    if ASKED != "all":
        return sample(ASKED)
    cases = list(PRODUCT)
    random.Random(0).shuffle(cases)  # so that a part of it is a sample
    return cases


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_has_each_value_of_each_dimension(seed: int) -> None:
    drawn = sample(str(seed))
    assert len(drawn) == COUNT == len(set(drawn)) or seed  # of the default seed, no case is there twice
    for place, (name, values) in enumerate(DIMENSIONS.items()):
        assert {case[place] for case in drawn} == set(values), f"{name} lacks a value"
    assert sample(str(seed)) == drawn


def test_the_product_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(set(PRODUCT))
    assert count == len(zoo.FAMILIES) * 4 * 2 * 2 * (len(MODES) - 1)
    with capsys.disabled():
        print(f" [FASTGEN_TEST_MODES={ASKED}: {len(_asked())} of {count} cases]", end="")


@pytest.mark.parametrize("case", _asked(), ids=lambda case: "-".join(map(str, case)))
def test_mode(case: Case, record_property: Callable[[str, object], None]) -> None:
    print(f"FASTGEN_TEST_MODES={ASKED} {case}")
    check(case)


def check(case: Case) -> list[judge.Verdict]:
    mode, family = MODES[case.mode], zoo.FAMILIES[case.family]
    options = {**SEARCHES[case.search], "max_new_tokens": case.tokens}
    if random.Random(str(case)).random() < 0.5:
        options |= {**judge.DETAILS, "output_logits": True}
    with mode.entered() if mode.is_born_inside else contextlib.nullcontext():
        model = zoo.fresh(case.family) if mode.is_born_inside else zoo.load(case.family)
        inputs = family.inputs(model, seed=3, batch=case.sentences) | family.generate
    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][: case.sentences]
    surroundings = [mode, MODES["plain"], mode] if mode.is_left_between else [mode]
    return [_check_call(around, model, inputs, options, family.expected) for around in surroundings]


def _check_call(mode: Mode, model: Any, inputs: dict[str, Any], options: dict[str, Any], family: str) -> judge.Verdict:
    expected = mode.expected if family == ACCELERATED else family
    generate = mode.wrapped(zoo.generate)
    failed: list[bool] = []

    def by_host(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
        with fastgen.disabled(), mode.entered():
            torch.manual_seed(harness.SEED)
            return generate(model, copy.deepcopy(inputs), **{**options, **more})

    def stock(**more: Any) -> Any:
        failed.append(True)
        output = by_host(model, inputs, **more)
        failed.pop()
        return output

    def ours(**more: Any) -> Any:
        with harness.configured(strict=expected == ACCELERATED), mode.entered():
            torch.manual_seed(harness.SEED)
            return generate(model, copy.deepcopy(inputs), **{**options, **more})

    def exact(**more: Any) -> Any:
        return by_host(copy.deepcopy(model).double(), harness.in_float64(inputs), **more)

    report.reset()
    verdict = judge.judged(stock, ours, options["num_beams"], mode.half, exact)
    calls = report.calls()
    assert verdict.kind != judge.DIFFERENT, verdict.why
    if failed:
        return verdict
    assert calls, "fastgen recorded no call: the stock code ran unseen"
    for call in calls:
        assert call.tier in harness.TIERS or call.reason, f"a fallback without a reason: {call}"
        if expected != FALLBACK and expected != ACCELERATED:
            continue
        assert (call.tier in harness.TIERS) == (expected == ACCELERATED), f"expected {expected}: {call}"
    return verdict


# ---------------------------------------------------------------------------------------------- modes of the user's
@pytest.mark.parametrize("mode", ["rounding_functions", "rounding_operators"])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_mode_that_changes_results(name: str, mode: str) -> None:
    with harness.configured(packing="always"):
        check(Case(name, "beams", 3, 8, mode))


@pytest.mark.parametrize("mode", [CountingFunctions, CountingOperators])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_mode_that_counts(name: str, mode: type[CountingFunctions] | type[CountingOperators]) -> None:
    """The call is left to the host: the mode's log is stock's log, call for call."""
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    zoo.generate(model, copy.deepcopy(inputs), num_beams=3, max_new_tokens=8)  # the first call loads what fastgen needs
    with fastgen.disabled(), mode() as stock:
        zoo.generate(model, copy.deepcopy(inputs), num_beams=3, max_new_tokens=8)
    with mode() as ours:
        zoo.generate(model, copy.deepcopy(inputs), num_beams=3, max_new_tokens=8)
    assert stock.counts == ours.counts


@pytest.mark.parametrize("search", ["beams", "sampled_beams"])
@pytest.mark.parametrize("mode", ["default_float64", "default_bfloat16"])
def test_scores_are_float32_whatever_the_default_dtype(mode: str, search: str) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=2)
    with MODES[mode].entered():
        output = harness.compare(model, inputs, **SEARCHES[search], max_new_tokens=8, output_scores=True)
    assert output.sequences_scores.dtype == torch.float32
