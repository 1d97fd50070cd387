"""The regression gate, on documents made up here: what it finds, what it finds by chance, and its exit status."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench import compare, noise
from fastgen.bench.compare import FAILURE, NOTE, REGRESSION, WARNING, Finding
from fastgen.bench.document import FORMAT
from fastgen.pipeline.errors import InputError

COUNTS = {"operators": 100, "allocations": 50, "allocated_bytes": 4096}


NOTHING = (FAILURE, "nothing of this run could be compared with the baseline")


def document(ratios: list[float] | None = None, **changes: Any) -> Any:
    """One task of stock and fastgen, whose rounds have these ratios."""
    ratios = [3.0, 3.03, 2.98, 3.01, 2.99] if ratios is None else ratios
    verified = {"against": "stock", "outputs": 8, "different": [], "same_tokens": 1.0, "must": True}
    task = {
        "name": "bart",
        "weights": "random",
        "options": {"num_beams": 4},
        "shape": {"batch": 8},
        "reference": "stock",
        "sides": {"stock": {"counts": dict(COUNTS)}, "fastgen": {"verified": verified, "counts": dict(COUNTS)}},
        "rounds": [{"seconds": {"stock": ratio * 0.7, "fastgen": 0.7}, "other_processes": {}} for ratio in ratios],
    }
    side = {"label": "", "settings": [], "lossy": False, "versions": {"transformers": "5.23.0"}}
    whole = {
        "fastgen_bench": FORMAT,
        "suite": "quick",
        "command": "fastgen-bench",
        "date": "2026-11-23T12:00:00+00:00",
        "statements": [],
        "machine": {"cpu": "one", "cores": 2, "threads": 2, "device": "cpu"},
        "versions": {"torch": "2.13.0", "fastgen": "0.1.0", "python": "3.11.7"},
        "settings": {"rounds": 5, "threads": 2, "quick": False},
        "sides": {"stock": side, "fastgen": {**side}},
        "sections": [],
        "tasks": [task],
    }
    return copy.deepcopy({**whole, **changes})


def found(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.severity, each.text) for each in findings]


def noisy(random_: random.Random, count: int, sigma: float, ratio: float = 3.0) -> list[float]:
    """A round's two sides are equally noisy: their ratio has `sigma`."""
    return [ratio * math.exp(random_.gauss(0, sigma)) for _ in range(count)]


def test_the_same_run_has_nothing_to_say() -> None:
    assert compare.compare(document(), document()) == []
    assert compare.table([]) == "Nothing has become worse.\n"


@pytest.mark.parametrize("rounds", [3, 5, 7, 11])
def test_chance_alone_is_rarely_a_regression(rounds: int) -> None:
    random_, trials = random.Random(rounds), 4000
    alarms = sum(
        compare.status(compare.compare(document(noisy(random_, rounds, 0.05)), document(noisy(random_, rounds, 0.05))))
        for _ in range(trials)
    )
    assert alarms < 0.01 * trials


@pytest.mark.parametrize(("rounds", "least"), [(3, 0.95), (5, 0.99), (11, 1.0)])
def test_a_real_drop_is_found(rounds: int, least: float) -> None:
    random_, trials = random.Random(rounds), 1000
    hits = sum(
        compare.status(
            compare.compare(document(noisy(random_, rounds, 0.02)), document(noisy(random_, rounds, 0.02, 3.0 * 0.85)))
        )
        for _ in range(trials)
    )
    assert hits >= least * trials


def test_drift_between_baselines_widens_what_chance_explains() -> None:
    """10% from run to run, of rounds that hardly differ: known only where there are several baselines."""
    random_, trials = random.Random(4), 400

    def drifted() -> Any:
        whole = document([])
        whole["tasks"] = []
        for number in range(6):
            task = document(noisy(random_, 5, 0.005, 3.0 * math.exp(random_.gauss(0, 0.1))))["tasks"][0]
            whole["tasks"].append({**task, "name": str(number)})
        return whole

    def alarms(baselines: int) -> float:
        regressions = [
            finding
            for _ in range(trials)
            for finding in compare.compare([drifted() for _ in range(baselines)], drifted())
            if finding.severity == REGRESSION
        ]
        return len(regressions) / (6 * trials)

    assert alarms(1) > 0.2
    assert alarms(3) < 0.015


def test_drops_below_the_smallest_do_not_count() -> None:
    assert compare.compare(document([3.0] * 5), document([3.0 * 0.955] * 5)) == []
    (finding,) = compare.compare(document([3.0] * 5), document([3.0 * 0.94] * 5))
    assert (finding.severity, finding.task, finding.side) == (REGRESSION, "bart", "fastgen")
    assert finding.text == "the ratio dropped by 6%"
    assert finding.before == pytest.approx(3) and finding.allowed == pytest.approx(2.85)


def test_one_disturbed_round_is_no_regression() -> None:
    assert compare.compare(document([3.0, 3.02, 2.97, 3.01, 2.99]), document([3.0, 3.01, 1.4, 2.98, 3.02])) == []


def test_of_one_round_each_only_a_warning() -> None:
    (finding,) = compare.compare(document([3.0]), document([2.0]))
    assert finding.severity == WARNING and "nobody knows" in finding.text
    assert compare.compare(document([3.0]), document([2.9])) == []


def test_a_better_ratio_is_a_note() -> None:
    assert found(compare.compare(document(), document([4.0, 4.01, 3.99, 4.0, 4.02]))) == [
        (NOTE, "the ratio rose by 33%: renew the baseline")
    ]


def test_outputs_that_differ_fail_where_they_must_not() -> None:
    new = document()
    new["tasks"][0]["sides"]["fastgen"]["verified"]["different"] = [2, 5]
    assert found(compare.compare(document(), new)) == [(FAILURE, "2 of 8 outputs differ from stock's")]


def test_outputs_that_nobody_compared_fail() -> None:
    new = document()
    del new["tasks"][0]["sides"]["fastgen"]["verified"]
    assert (FAILURE, "its outputs were compared, and now they were not") in found(compare.compare(document(), new))


def test_a_peer_cannot_fail() -> None:
    old, new = document(), document([2.0] * 5)
    for each in (old, new):
        each["tasks"][0]["sides"]["peer"] = {}
        for one in each["tasks"][0]["rounds"]:
            one["seconds"]["peer"] = one["seconds"]["fastgen"]
            one["seconds"]["fastgen"] = one["seconds"]["stock"] / 3
    assert found(compare.compare(old, new)) == [(NOTE, "the ratio dropped by 33%")]


def test_a_side_that_is_refused_now_fails() -> None:
    new = document([])
    new["tasks"][0]["sides"]["fastgen"] = {"refused": "it has hooks"}
    (finding,) = compare.compare(document(), new)
    assert (finding.severity, finding.text) == (FAILURE, "it did this task, and now refuses it: it has hooks")
    assert found(compare.compare(new, new)) == [NOTHING]


def test_what_was_not_run_is_said() -> None:
    new = document()
    new["tasks"][0]["name"] = "t5"
    assert found(compare.compare(document(), new)) == [
        NOTHING,
        (WARNING, "this task was not run"),
        (NOTE, "the baseline does not have this task"),
    ]
    new = document([])
    del new["tasks"][0]["sides"]["fastgen"]
    assert found(compare.compare(document(), new)) == [NOTHING, (WARNING, "this side was not run")]


def test_counts_are_exact() -> None:
    new = document()
    new["tasks"][0]["sides"]["fastgen"]["counts"] = {"operators": 101, "allocations": 50, "allocated_bytes": 4000}
    findings = compare.compare(document(), new)
    assert found(findings) == [(REGRESSION, "more operators"), (NOTE, "fewer allocated bytes: renew the baseline")]
    assert (findings[0].before, findings[0].now) == (100, 101)
    del new["tasks"][0]["sides"]["fastgen"]["counts"]
    assert found(compare.compare(document(), new)) == [(WARNING, "the baseline has counts, and this run has none")]


def test_counts_of_other_versions_fail_uncompared() -> None:
    new = document()
    new["sides"]["fastgen"]["versions"]["transformers"] = "5.24.0"
    new["tasks"][0]["sides"]["fastgen"]["counts"]["operators"] = 999
    assert found(compare.compare(document(), new)) == [
        (
            FAILURE,
            "counts belong to versions and are not compared, as the baseline's had transformers (5.23.0, now 5.24.0): "
            "renew it",
        )
    ]
    new = document(versions={"torch": "2.13.0", "fastgen": "0.2.0", "python": "3.11.8"})
    new["tasks"][0]["sides"]["fastgen"]["counts"]["operators"] = 999
    assert (REGRESSION, "more operators") in found(compare.compare(document(), new))


def test_another_machine_is_a_warning_and_ratios_are_compared_all_the_same() -> None:
    new = document([1.0] * 5, machine={"cpu": "other", "cores": 2, "threads": 2, "device": "cpu"})
    assert found(compare.compare(document(), new)) == [
        (REGRESSION, "the ratio dropped by 67%"),
        (WARNING, "ratios are compared although the baseline had other cpu (one, now other)"),
    ]


def test_another_task_of_the_same_name_is_a_warning() -> None:
    new = document()
    new["tasks"][0]["shape"] = {"batch": 9}
    text = "not compared: the task has other shape than in the baseline"
    assert found(compare.compare(document(), new)) == [NOTHING, (WARNING, text)]


def test_another_reference_is_not_compared() -> None:
    new = document([1.0] * 5)
    new["tasks"][0]["reference"] = "fastgen"
    assert compare.compare(document(), new) == []


def test_outputs_at_near_ties_now_are_a_warning() -> None:
    new = document()
    new["tasks"][0]["sides"]["fastgen"]["verified"]["near_ties"] = [3]
    assert found(compare.compare(document(), new)) == [(WARNING, "outputs that were the same are at near-ties now: 3")]
    assert compare.compare(new, new) == [] and compare.status(compare.compare(document(), new)) == 0


def test_what_would_be_noticed_is_said() -> None:
    assert compare.sensitivity([document([3.0])], document([3.0])) == ""  # of one round nothing is known
    same = [3.0] * 5
    assert compare.sensitivity([document(same)], document(same)) == "A ratio that drops by 5% or more fails."
    allowed = noise.allowed_drop([[math.log(x) for x in (3.0, 2.0, 4.0)]], [math.log(3.0)] * 3, noise.Estimate(0, 0))
    said = compare.sensitivity([document([3.0, 2.0, 4.0])], document([3.0] * 3))
    assert allowed is not None and f"{-math.expm1(-allowed):.0%}" in said


def test_exit_status_and_table(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps(document()))
    before = compare.load(file)
    assert compare.status(compare.compare([before, before], document())) == 0
    findings = compare.compare(before, document([2.0, 2.01, 1.99, 2.0, 2.02]))
    assert compare.status(findings) == 1
    text = compare.table(findings)
    assert "regression  bart  fastgen  3       2" in text
    assert text.endswith("It has become worse: 1 regression.\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: No such file or directory."),
        ("{", "is not JSON: "),
        ("[]", "was not written by fastgen-bench."),
        ('{"a": 1}', "was not written by fastgen-bench."),
        ('{"fastgen_bench": 99}', f"has format 99 of fastgen-bench; this version reads {FORMAT}."),
        (
            f'{{"fastgen_bench": {FORMAT}}}',
            "it has no command, date, machine, sections, settings, sides, statements, s",
        ),
        (json.dumps(document(tasks=7)), "tasks is not a list."),
        (json.dumps(document(tasks=[{"name": "x", "sides": {"stock": 5}}])), "tasks.0.sides.stock is no object."),
        (json.dumps(document(tasks=[{"name": "x", "sides": {"stock": {"seconds": "1"}}}])), "stock.seconds is not a n"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "some.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as error:
        compare.load(file)
    assert str(error.value).startswith(str(file)) and says in str(error.value) and "\n" not in str(error.value)


def test_no_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="no baseline"):
        compare.compare([], document())


def test_students_quantiles_are_those_of_the_next_fewer_degrees() -> None:
    assert noise.student(1) == 63.657 and noise.student(4.9) == 4.604 and noise.student(1e9) == 2.617
    assert noise.student(0.5) == 63.657


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
def test_the_variance_of_a_median_is_not_underestimated(count: int) -> None:
    random_ = random.Random(count)
    medians = [noise.center([random_.gauss(0, 1) for _ in range(count)]) for _ in range(20000)]
    variance = sum(each**2 for each in medians) / len(medians)
    assert variance <= 1.03 * noise.variance_of_median(count)
