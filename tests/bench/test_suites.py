"""The suites: every task names what exists, and names are told apart."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.bench import allowed, run
from fastgen.bench.captioners import CAPTIONERS
from fastgen.bench.fairseq_models import ARCHITECTURES
from fastgen.bench.measure import Settings
from fastgen.bench.models import SHAPES, TRAINED
from fastgen.bench.quality import MEASURES
from fastgen.bench.sections import needed
from fastgen.bench.sides import SIDES
from fastgen.bench.suites import SUITES

SHOWN = {"ratios", "lines", "phases", "memory", "seconds", "metrics", "outputs"}
EACH = [pytest.param(name, quick, id=f"{name}{'-quick' * quick}") for name in SUITES for quick in (False, True)]


def test_all_of_the_suites_are_there() -> None:
    tables = [f"fastseq-table{number}" for number in (1, 2, 3, 4)]
    others = "peers longer int8 captions slim-whisper lightseq-fig5 lightseq-fig6 scale wide".split()
    assert {*others, *tables} == set(SUITES)


@pytest.mark.parametrize(("suite", "quick"), EACH)
def test_tasks_name_what_exists(suite: str, quick: bool) -> None:
    sections = SUITES[suite](quick)
    tasks = [task for section in sections for task in section.tasks]
    assert tasks
    assert len({task.name for task in tasks}) == len(tasks)
    for section in sections:
        assert section.text and set(section.show) <= SHOWN
        for task in section.tasks:
            assert len(task.sides) > 1 and set(task.sides) <= set(SIDES)
            assert not SIDES[task.reference].is_ours
            hosts = {SIDES[name].runner for name in task.sides}
            if "fairseq" in hosts:
                assert task.model in ARCHITECTURES or task.model == "ddtp"
            if hosts & {"transformers", "ctranslate2", "lists", "lines"}:
                assert task.model in SHAPES or task.model in TRAINED or task.model in CAPTIONERS
            if "metrics" in section.show:
                assert task.model in MEASURES
            json.dumps(task.as_dict())
            for name in task.sides:  # whom it must equal is there to be compared with
                assert SIDES[name].equals in ("", *task.sides)


@pytest.mark.parametrize("suite", SUITES)
def test_quick_runs_need_no_data(suite: str) -> None:
    assert not any(needed(task, {}) for section in SUITES[suite](True) for task in section.tasks)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("suite", ["scale", "wide", "lightseq-fig5", "lightseq-fig6"])
def test_curves_vary_in_one_size(suite: str, quick: bool) -> None:
    for section in SUITES[suite](quick):
        for line, points in itertools.groupby(section.tasks, key=lambda task: task.line):
            shapes = [task.shape for task in points]
            axis = section.tasks[0].axis
            assert line and len({shape[axis] for shape in shapes}) == len(shapes) > 1
            if suite == "scale":  # lengths of source and output grow together in the others
                rest = [{name: size for name, size in shape.items() if name != axis} for shape in shapes]
                assert all(one == rest[0] for one in rest)


def test_what_lacks_data_is_left_out_and_said() -> None:
    sections = run.sections("fastseq-table4", False, Settings(), [], [])
    assert [task.name for task in sections[0].tasks] == ["quality-demo"]
    assert "Left out: Whisper-base, 11 s of speech, 5 beams (needs --shared DIR and --whisper DIR)." in sections[0].text
    folders = {"shared": "x", "whisper": "y"}
    assert len(run.sections("fastseq-table4", False, Settings(folders=folders), [], [])[0].tasks) == 4


def test_only_some_tasks_and_sides() -> None:
    sections = run.sections("peers", True, Settings(), ["gpt2"], ["fastgen"])
    assert [(section.title, [task.name for task in section.tasks]) for section in sections] == [
        ("Beam search", ["gpt2"])
    ]
    assert sections[0].tasks[0].sides == ("transformers", "fastgen")


def test_every_side_says_how_it_is_configured() -> None:
    assert all(side.settings and side.label for side in SIDES.values())
    assert all(side.environment for side in SIDES.values())  # none depends on the user's own


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_allowed_outputs(is_encoder_decoder: bool) -> None:
    """Of three tokens each, behind a prompt; then the end. The trie and the function allow the same."""
    torch = pytest.importorskip("torch")
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=1000, is_encoder_decoder=is_encoder_decoder))
    task = {"allowed_outputs": 40, "new": 3, "source": 4}
    prompt = [7] if is_encoder_decoder else [7, 8, 9, 7]

    def outputs(allow: Any, written: list[int]) -> list[list[int]]:
        may = allow(0, torch.tensor(prompt + written))
        if len(written) == 3:
            assert {*may} == {1}
            return [written]
        return sorted(found for token in may for found in outputs(allow, [*written, token]))

    found = outputs(allowed.trie_for(task, model), [])
    assert len(found) == 40 and all(500 <= token < 756 for each in found for token in each)
    function = allowed.function_for(task, model)
    assert outputs(function, []) == found
    assert function(0, torch.tensor([*prompt, 3])) == [1]  # no sequence begins so
