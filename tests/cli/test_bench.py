"""fastgen-bench as a command: what it refuses, lists, writes and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench import document
from fastgen.bench.sides import SIDES
from fastgen.bench.suites import SUITES
from fastgen.cli import bench

pytest.importorskip("transformers")

BANS = ["fastseq-table3", "--quick", "--rounds", "2", "--threads", "1", "--side", "ngrams-fastgen"]


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert bench.main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    return shown.err.strip().removeprefix("fastgen-bench: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["peer"], f"There is no suite 'peer': the suites are {', '.join(SUITES)} and soak."),
        (["--rounds", "0"], "Argument --rounds: '0' is not a whole number above 0; --help lists the flags."),
        (["--threads", "x"], "Argument --threads: 'x' is not a whole number above 0; --help lists the flags."),
        (["--quik"], "Unrecognized arguments: --quik; --help lists the flags."),
        (["--shared", "nowhere"], "--shared nowhere: there is no such folder."),
        (["--task", "whisper"], "--task whisper needs --shared DIR and --whisper DIR."),
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--report", "nowhere.json"], "nowhere.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--task", "--side"])
def test_unknown_names_are_refused_with_the_known_ones(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "fastseq-table3", option, "nothing")
    assert said.startswith(f"{option} nothing: no task of fastseq-table3 has it; they have ngrams")


def test_a_file_that_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    for text in ("", "[]", "{}", json.dumps({"fastgen_bench": document.FORMAT + 1})):
        file.write_text(text)
        assert str(file) in refused(capsys, "--report", file)


def test_a_baseline_of_another_suite_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[2] / "benchmarks/baselines/counts.json"
    said = refused(capsys, "fastseq-table3", "--compare", file)
    assert said == f"--compare {file} is of the suite peers, which is not measured now."


def test_no_gpu_is_said_before_anything_slow(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert refused(capsys, "--device", "cuda") == "--device cuda: torch sees no CUDA device."


def test_the_list_names_every_task_and_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["all", "--list"]) == 0
    shown = capsys.readouterr().out
    for name, suite in SUITES.items():
        assert f"{name}: " in shown
        for section in suite(False):
            assert all(
                task.name in shown for task in section.tasks if task.model not in ("ddtp", "whisper", "smollm", "g2p")
            )


@pytest.mark.slow
def test_a_run_writes_its_results_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*BANS, "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (file,), (page,) = tmp_path.glob("*.json"), tmp_path.glob("*.html")
    assert re.fullmatch(r"fastseq-table3-quick-\d{4}-\d\d-\d\d\.json", file.name)
    assert str(file) in shown and str(page) in shown and "Bans of repeated n-grams" in shown
    found = json.loads(file.read_text())
    assert found["command"].startswith("fastgen-bench fastseq-table3 --quick")
    assert found["settings"] | {"rounds": 2, "threads": 1, "quick": True} == found["settings"]
    assert list(found["sides"]) == ["ngrams-transformers", "ngrams-fastgen"]
    ratio = found["tasks"][0]["sides"]["ngrams-fastgen"]["ratio"]
    assert f"{ratio['median']:.2f}" in page.read_text()

    # The page again, and the same figures against themselves.
    page.unlink()
    assert bench.main(["--report", str(file), "--output", str(tmp_path)]) == 0
    assert page.exists()


@pytest.mark.slow
def test_wrong_outputs_are_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    other = dataclasses.replace(SIDES["ngrams-fastgen"], options={"which": "fastgen", "n": 2})
    monkeypatch.setitem(SIDES, "ngrams-fastgen", other)
    assert bench.main([*BANS, "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "outputs of ngrams-fastgen differ from ngrams-transformers's" in shown.err
