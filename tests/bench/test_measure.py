"""Measuring: outputs are compared before anything is timed, and a side that is wrong, refuses or dies is said to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench import measure, run
from fastgen.bench.child import Child
from fastgen.bench.measure import Settings, verify
from fastgen.bench.runners import Refused
from fastgen.bench.sections import Section
from fastgen.bench.sides import SIDES, Side
from fastgen.bench.tasks import Task

pytest.importorskip("transformers")

HOSTS = ("transformers", "fastgen")
TASK = Task("tiny", "the shipped model, 3 inputs", "demo", HOSTS, batch=2, new=20, beams=2, limit=3)
SETTINGS = Settings(rounds=2, threads=1)


def measured(task: Task, show: list[str] | None = None, settings: Settings = SETTINGS) -> Any:
    return measure.run(task, settings, show or [], lambda what: None)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a side like another, with changes."""

    def add(like: str, **changes: Any) -> str:
        monkeypatch.setitem(SIDES, "changed", dataclasses.replace(SIDES[like], **changes))
        return "changed"

    return add


# ---------------------------------------------------------------------------------------------- comparing
ROWS: dict[str, Any] = {"tokens": [[5, 6, 7], [8]], "rows": [[2, 5, 6, 7], [2, 8, 1, 1]]}


def test_the_same_outputs() -> None:
    found = verify(ROWS, ROWS, "stock", must=True)
    assert found == {"against": "stock", "outputs": 2, "different": [], "same_tokens": 1.0, "must": True}


def test_one_token_differs() -> None:
    other = {"tokens": [[5, 9, 7], [8]], "rows": [[2, 5, 9, 7], [2, 8, 1, 1]]}
    found = verify(ROWS, other, "stock", must=False)
    assert found["different"] == [0] and found["same_tokens"] == 0.75


def test_what_must_be_equal_is_compared_with_its_padding() -> None:
    other = {**ROWS, "rows": [[2, 5, 6, 7], [2, 8, 1]]}
    assert verify(ROWS, other, "stock", must=True)["different"] == [1]
    assert verify(ROWS, other, "stock", must=False)["different"] == []


@pytest.mark.parametrize(("off", "different"), [(1e-5, []), (1e-3, [1]), (float("nan"), [1])])
def test_scores_count(off: float, different: list[int]) -> None:
    theirs, ours = ({**ROWS, "scores": [[-1.0], [-2.0 + by]]} for by in (0.0, off))
    assert verify(theirs, ours, "stock", must=True)["different"] == different


def test_a_shorter_output_differs() -> None:
    found = verify(ROWS, {**ROWS, "tokens": [[5, 6], [8]]}, "stock", must=False)
    assert found["different"] == [0] and found["same_tokens"] == 0.75


# ---------------------------------------------------------------------------------------------- a task
@pytest.mark.slow
def test_a_task_from_its_processes_to_its_ratios() -> None:
    result, versions = measured(TASK, ["metrics", "phases"])
    stock, ours = (result["sides"][name] for name in HOSTS)
    assert ours["verified"] == {
        "against": "transformers",
        "outputs": 3,
        "different": [],
        "same_tokens": 1.0,
        "must": True,
    }
    assert ours["tiers"]["fast"] == 2 and ours["tiers"]["stock"] == 0 and "tiers" not in stock
    assert ours["cache_bytes"] and stock["cache_bytes"] > ours["cache_bytes"]
    assert len(result["rounds"]) == 2
    for one in result["rounds"]:
        assert set(one["seconds"]) == set(one["other_processes"]) == set(HOSTS)
    assert [list(one["seconds"]) for one in result["rounds"]] == [[*HOSTS], [*HOSTS][::-1]]
    ratios = sorted(one["seconds"]["transformers"] / one["seconds"]["fastgen"] for one in result["rounds"])
    assert ours["ratio"] == {"median": sum(ratios) / 2, "min": ratios[0], "max": ratios[1]}
    assert stock["metrics"] == ours["metrics"] and set(ours["metrics"]) == {"exact match"}
    for found in (stock, ours):
        assert found["phases"]["encoder"] > 0 and found["phases"]["next-token choice"] > 0
    assert versions["fastgen"]["transformers"]
    json.dumps(result)


@pytest.mark.slow
def test_a_side_whose_outputs_are_wrong_is_not_timed(side: Any) -> None:
    name = side("fastgen", options={"generate": {"num_beams": 1, "max_new_tokens": 3}})
    result, _ = measured(dataclasses.replace(TASK, sides=("transformers", name)))
    wrong = result["sides"][name]
    assert len(wrong["verified"]["different"]) == 3 and "seconds" not in wrong and "ratio" not in wrong
    assert all(list(one["seconds"]) == ["transformers"] for one in result["rounds"])
    assert "3 of 3 outputs of changed differ from transformers's" in run.is_wrong({"tasks": [result]})[0]  # type: ignore[typeddict-item]


@pytest.mark.slow
def test_a_side_that_falls_back_is_refused_not_timed(side: Any) -> None:
    name = side("fastgen", options={"generate": {"force_words_ids": [[[20]]]}})
    result, _ = measured(dataclasses.replace(TASK, sides=("transformers", name)))
    assert "FallbackError" in result["sides"][name]["refused"] or "constrained" in result["sides"][name]["refused"]
    assert len(run.is_wrong({"tasks": [result]})) == 1  # type: ignore[typeddict-item]


def order(runner: str, task: Task = TASK) -> dict[str, Any]:
    side = Side("x", runner, ["x"])
    return measure.order(side, runner, task, SETTINGS, "")


@pytest.mark.slow
def test_a_process_that_dies_says_its_last_words() -> None:
    child = Child(order("transformers"), {"PYTHONSTARTUP": ""})
    try:
        child.load()
        child._process.kill()
        with pytest.raises(Refused, match="its process died with exit status -9"):
            child.first()
    finally:
        child.close()


def test_an_error_of_a_side_is_its_answer() -> None:
    child = Child(order("transformers", dataclasses.replace(TASK, model="missing")), {})
    try:
        with pytest.raises(Refused, match="KeyError: 'missing'"):
            child.load()
    finally:
        child.close()


def test_sides_do_not_see_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user's FASTGEN_TIER would change what is measured."""
    for name in ("FASTGEN_TIER", "FASTGEN_PACKING"):
        monkeypatch.setenv(name, "nonsense")  # which is an error where it is read
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    child = Child(order("ngrams", TASK), {"FASTGEN_DISABLE": "1"})
    try:
        with contextlib.suppress(Refused):
            child.load()  # then its environment is its own
        environment = Path(f"/proc/{child._process.pid}/environ")
        if environment.exists():
            text = environment.read_bytes().replace(b"\0", b"\n").decode()
            assert "nonsense" not in text and "OMP_NUM_THREADS=1" in text
    finally:
        child.close()


# ---------------------------------------------------------------------------------------------- a suite
@pytest.mark.slow
def test_what_is_done_is_written_before_the_next_task(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    seen: list[int] = []

    def say(what: str, task: Task | None) -> None:
        if task is not None and what == "loading":
            seen.append(len(json.loads(file.read_text())["tasks"]) if file.exists() else 0)

    bans = Task("bans", "x", "ngrams", ("ngrams-transformers", "ngrams-fastgen"), 2, new=20, beams=2)
    planned = [Section("A", "a.", [bans, dataclasses.replace(bans, name="again")], ["ratios"])]
    found = run.run("s", planned, True, SETTINGS, "fastgen-bench s", file, say)
    assert seen == [0, 1]
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    assert found["sections"][0]["tasks"] == ["bans", "again"]
    assert found["sides"]["ngrams-fastgen"]["versions"]["torch"] == found["versions"]["torch"]
    assert not run.is_wrong(found)
