"""The journal: cut back to what is complete, refuse another run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgen.pipeline import InputError
from fastgen.pipeline.resume import Journal, journal_path

SETTINGS = {"beam": 5, "path": Path("model.pt")}
BATCHES = ["eins\n", "zwei\nzwölf\n", "drei\n"]


def write_run(results: Path, batches: list[str] = BATCHES) -> None:
    journal = Journal(results, SETTINGS)
    journal.start()
    with open(results, "w", encoding="utf-8") as file:
        for number, text in enumerate(batches):
            file.write(text)
            file.flush()
            journal.batch(results.stat().st_size, number=number)
    journal.close(finished=False)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "out.txt"
    write_run(path)
    return path


def test_a_complete_journal_keeps_everything(results: Path) -> None:
    journal = Journal(results, SETTINGS)
    assert [record["number"] for record in journal.resume()] == [0, 1, 2]
    journal.close(finished=False)
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_killed_at_any_byte_the_file_is_cut_to_whole_batches(results: Path) -> None:
    text, notes = results.read_bytes(), journal_path(results).read_bytes()
    ends = [len("".join(BATCHES[:n]).encode()) for n in range(4)]
    cuts = [i for i in range(len(notes)) if notes[i - 1 : i] == b"\n" or i % 7 == 0]
    for cut in cuts:
        journal_path(results).write_bytes(notes[:cut])
        lines = notes[:cut].count(b"\n")
        results.write_bytes(text)
        journal = Journal(results, SETTINGS)
        if lines == 0:
            with pytest.raises(InputError, match="not a journal"):
                journal.resume()
            continue
        assert len(journal.resume()) == lines - 1
        assert results.read_bytes() == text[: ends[lines - 1]]
        journal.batch(0, number=99)  # goes on a line of its own
        journal.close(finished=False)
        assert [json.loads(line) for line in journal_path(results).read_text("utf-8").splitlines()]


def test_lines_that_the_results_file_lost_are_done_again(results: Path) -> None:
    results.write_bytes(results.read_bytes()[:-3])
    journal = Journal(results, SETTINGS)
    assert len(journal.resume()) == 2
    journal.close(finished=False)
    assert results.read_text("utf-8") == "".join(BATCHES[:2])


def test_other_settings_are_refused_by_name(results: Path) -> None:
    with pytest.raises(InputError, match="another beam"):
        Journal(results, {**SETTINGS, "beam": 4}).resume()
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_a_file_that_is_no_journal_is_refused(results: Path) -> None:
    journal_path(results).write_text('{"a": 1}\n', "utf-8")
    with pytest.raises(InputError, match="not a journal"):
        Journal(results, SETTINGS).resume()


def test_a_finished_run_leaves_no_journal(results: Path) -> None:
    journal = Journal(results, SETTINGS)
    journal.resume()
    journal.close(finished=True)
    assert not journal_path(results).exists()
