"""The journal: cut back to what is complete, refuse another run's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastgen.pipeline import InputError
from fastgen.pipeline.resume import Journal, journal_path

SETTINGS = {"beam": 5, "path": Path("model.pt")}
BATCHES = ["eins\n", "zwei\nzwölf\n", "drei\n"]


@contextlib.contextmanager
def interrupted(journal: Journal, *, resume: bool) -> Iterator[list[dict[str, Any]]]:
    """A run that ends before its end."""
    with contextlib.suppress(KeyboardInterrupt), journal.begin(resume=resume) as records:
        yield records
        raise KeyboardInterrupt


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "out.txt"
    journal = Journal(path, SETTINGS)
    with interrupted(journal, resume=False) as records, open(path, "w", encoding="utf-8") as file:
        assert records == []
        for number, text in enumerate(BATCHES):
            file.write(text)
            file.flush()
            journal.batch(path.stat().st_size, number=number)
    return path


def test_a_complete_journal_keeps_everything(results: Path) -> None:
    with interrupted(Journal(results, SETTINGS), resume=True) as records:
        assert [record["number"] for record in records] == [0, 1, 2]
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_killed_at_any_byte_the_file_is_cut_to_whole_batches(results: Path) -> None:
    text, notes = results.read_bytes(), journal_path(results).read_bytes()
    ends = [len("".join(BATCHES[:n]).encode()) for n in range(4)]
    cuts = [i for i in range(len(notes) + 1) if notes[i - 1 : i] == b"\n" or i % 7 == 0]
    assert len(cuts) > 20
    for cut in cuts:
        journal_path(results).write_bytes(notes[:cut])
        batches = max(notes[:cut].count(b"\n") - 1, 0)
        results.write_bytes(text)
        journal = Journal(results, SETTINGS)
        with interrupted(journal, resume=True) as records:
            assert len(records) == batches
            if records:  # without any, the caller begins a new file
                assert results.read_bytes() == text[: ends[batches]]
            journal.batch(0, number=99)  # goes on a line of its own
        lines = [json.loads(line) for line in journal_path(results).read_text("utf-8").splitlines()]
        assert "settings" in lines[0] and lines[-1]["number"] == 99 and len(lines) == batches + 2


def test_lines_that_the_results_file_lost_are_done_again(results: Path) -> None:
    results.write_bytes(results.read_bytes()[:-3])
    with interrupted(Journal(results, SETTINGS), resume=True) as records:
        assert len(records) == 2
    assert results.read_text("utf-8") == "".join(BATCHES[:2])


def test_without_resume_it_begins_anew(results: Path) -> None:
    with interrupted(Journal(results, SETTINGS), resume=False) as records:
        assert records == []
    assert journal_path(results).read_bytes().count(b"\n") == 1


def test_other_settings_are_refused_by_name(results: Path) -> None:
    with pytest.raises(InputError, match="another beam"), Journal(results, {**SETTINGS, "beam": 4}).begin(resume=True):
        pass
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_a_file_that_is_no_journal_is_refused(results: Path) -> None:
    journal_path(results).write_text('{"a": 1}\n', "utf-8")
    with pytest.raises(InputError, match="not a journal"), Journal(results, SETTINGS).begin(resume=True):
        pass


def test_a_finished_run_leaves_no_journal(results: Path) -> None:
    with Journal(results, SETTINGS).begin(resume=True):
        pass
    assert not journal_path(results).exists()
