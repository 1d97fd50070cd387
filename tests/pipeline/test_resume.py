"""The results file and its journal: cut back to what is complete, refuse another run's, let one run write."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.pipeline import InputError, resume
from fastgen.pipeline.resume import Journal, contents, journal_path

SETTINGS = {"beam": 5, "path": Path("model.pt")}
BATCHES = ["eins\n", "zwei\nzwölf\n", "drei\n"]


@contextlib.contextmanager
def begun(results: Path, *, resume: bool, overwrite: bool = False) -> Iterator[tuple[Journal, list[int]]]:
    """A run with its results opened, and the numbers of the batches that an earlier one noted."""
    with Journal(results, SETTINGS).locked(resume=resume, overwrite=overwrite) as journal:
        with journal.earlier() as records:
            numbers = [record["number"] for record in records]
        with journal.opened():
            yield journal, numbers


@contextlib.contextmanager
def interrupted(results: Path, *, resume: bool, overwrite: bool = False) -> Iterator[tuple[Journal, list[int]]]:
    """A run that ends before its end."""
    with contextlib.suppress(KeyboardInterrupt), begun(results, resume=resume, overwrite=overwrite) as run:
        yield run
        raise KeyboardInterrupt


def inspect(results: Path, **settings: object) -> Journal:
    """What --resume finds."""
    with Journal(results, {**SETTINGS, **settings}).locked(resume=True) as journal:
        return journal


def write(journal: Journal) -> None:
    for number, text in enumerate(BATCHES):
        journal.write(text)
        journal.batch(number=number)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Of a run that was interrupted after its last batch."""
    path = tmp_path / "out.txt"
    with interrupted(path, resume=False) as (journal, numbers):
        assert numbers == []
        write(journal)
    return path


@pytest.fixture
def finished(results: Path) -> Path:
    with begun(results, resume=True):
        pass
    return results


def test_a_complete_journal_keeps_everything(results: Path) -> None:
    with interrupted(results, resume=True) as (_, numbers):
        assert numbers == [0, 1, 2]
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_killed_at_any_byte_the_file_is_cut_to_whole_batches(results: Path) -> None:
    text, notes = results.read_bytes(), journal_path(results).read_bytes()
    ends = [len("".join(BATCHES[:n]).encode()) for n in range(4)]
    cuts = [i for i in range(notes.index(b"\n") + 1, len(notes) + 1) if notes[i - 1 : i] == b"\n" or i % 7 == 0]
    assert len(cuts) > 20
    for cut in cuts:
        journal_path(results).write_bytes(notes[:cut])
        batches = notes[:cut].count(b"\n") - 1
        results.write_bytes(text)
        with interrupted(results, resume=True) as (journal, numbers):
            assert numbers == list(range(batches))
            assert results.read_bytes() == text[: ends[batches]]
            journal.write("mehr\n")
            journal.batch(number=99)  # goes on a line of its own
        lines = [json.loads(line) for line in journal_path(results).read_text("utf-8").splitlines()]
        assert "settings" in lines[0] and lines[-1]["number"] == 99 and len(lines) == batches + 2
        with interrupted(results, resume=True) as (_, numbers):  # the CRC went on where it was
            assert numbers == [*range(batches), 99]
        assert results.read_bytes() == text[: ends[batches]] + b"mehr\n"


def test_lines_that_the_results_file_lost_are_done_again(results: Path) -> None:
    results.write_bytes(results.read_bytes()[:-3])
    with interrupted(results, resume=True) as (_, numbers):
        assert numbers == [0, 1]
    assert results.read_text("utf-8") == "".join(BATCHES[:2])


def test_what_is_there_is_neither_overwritten_nor_gone_on_with_unless_it_is_said(results: Path) -> None:
    before = results.read_bytes(), journal_path(results).read_bytes()
    with (
        pytest.raises(InputError, match="--resume goes on with it, --overwrite replaces it"),
        begun(results, resume=False),
    ):
        pass
    with pytest.raises(InputError, match="give one of them"), begun(results, resume=True, overwrite=True):
        pass
    assert (results.read_bytes(), journal_path(results).read_bytes()) == before
    journal_path(results).unlink()
    with (
        pytest.raises(InputError, match="no journal of a run that wrote it: --overwrite"),
        begun(results, resume=False),
    ):
        pass
    assert results.read_bytes() == before[0] and not journal_path(results).exists()


def test_an_empty_file_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "out.txt").touch()
    with begun(tmp_path / "out.txt", resume=False) as (journal, _):
        write(journal)
    assert (tmp_path / "out.txt").read_text("utf-8") == "".join(BATCHES)


def test_with_overwrite_it_begins_anew(results: Path) -> None:
    with interrupted(results, resume=False, overwrite=True) as (_, numbers):
        assert numbers == []
    assert journal_path(results).read_bytes().count(b"\n") == 1
    assert results.read_bytes() == b""


def test_a_run_that_is_refused_before_it_opens_the_results_changes_nothing(results: Path) -> None:
    before = results.read_bytes(), journal_path(results).read_bytes()
    with contextlib.suppress(KeyboardInterrupt), Journal(results, SETTINGS).locked(overwrite=True):
        raise KeyboardInterrupt
    assert (results.read_bytes(), journal_path(results).read_bytes()) == before


def test_a_run_that_opened_nothing_leaves_no_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.txt", SETTINGS).locked():
        assert journal_path(tmp_path / "out.txt").exists()
    assert list(tmp_path.iterdir()) == []


# What is refused.


def test_other_settings_are_refused_by_name(results: Path) -> None:
    with pytest.raises(InputError, match="another beam"):
        inspect(results, beam=4)
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_another_file_at_the_same_path_is_another_setting(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("eins\n")
    before = contents(path)
    assert contents(path) == before
    (tmp_path / "new").write_text("zwei\n")
    os.utime(tmp_path / "new", ns=(1, 1))
    (tmp_path / "new").replace(path)
    assert contents(path) != before and list(before) == [f"content of {path}"]


def test_results_that_were_changed_are_refused(results: Path) -> None:
    text = results.read_bytes()
    results.write_bytes(text.replace(b"zwei", b"ZWEI"))
    with pytest.raises(InputError, match="was changed since"):
        inspect(results)
    results.write_bytes(text + b"rest of a batch")  # not noted, so cut off
    assert inspect(results).resuming


def test_a_file_that_is_no_journal_is_refused(results: Path) -> None:
    for text in ('{"a": 1}\n', "eins\n", "[]", '{"settings": 3}\n'):
        journal_path(results).write_text(text, "utf-8")
        with pytest.raises(InputError, match="not a journal"):
            inspect(results)


@pytest.mark.parametrize(
    "line",
    ["[1]", "3", "null", "{}", '{"bytes": 3}', '{"bytes": "3", "crc": 1}', '{"bytes": 3, "crc": null}', '{"done": []}'],
)
def test_a_damaged_journal_is_one_sentence(results: Path, line: str) -> None:
    with open(journal_path(results), "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError, match="is damaged"):
        inspect(results)


def test_an_entry_without_what_the_command_needs_is_damaged(results: Path) -> None:
    path = journal_path(results)
    path.write_text(path.read_text("utf-8").replace('"number"', '"numero"'), "utf-8")
    with pytest.raises(InputError, match="is damaged"), begun(results, resume=True):
        pass
    assert results.read_text("utf-8") == "".join(BATCHES)


def test_results_without_a_journal_are_refused(results: Path) -> None:
    journal_path(results).unlink()
    with pytest.raises(InputError, match="there is no"):
        inspect(results)
    assert not journal_path(results).exists()


# The end.


def test_a_finished_run_is_complete_with_the_same_settings_only(finished: Path) -> None:
    assert journal_path(finished).read_bytes().count(b"\n") == 2
    assert inspect(finished).complete
    with pytest.raises(InputError, match="another beam"):
        inspect(finished, beam=4)


def test_a_finished_run_whose_results_were_changed_is_refused(finished: Path) -> None:
    text = finished.read_bytes()
    for other in (text + b"more\n", text[:-1], text.replace(b"e", b"E")):
        finished.write_bytes(other)
        with pytest.raises(InputError, match="was changed since"):
            inspect(finished)


def test_a_finished_run_begins_anew_with_overwrite_or_without_results(finished: Path) -> None:
    with (
        pytest.raises(InputError, match="--resume goes on with it, --overwrite replaces it"),
        begun(finished, resume=False),
    ):
        pass
    with begun(finished, resume=False, overwrite=True) as (journal, numbers):
        assert numbers == []
        write(journal)
    finished.unlink()
    with begun(finished, resume=True) as (_, numbers):
        assert numbers == []


# The lock.

_OTHER = """
import sys
from pathlib import Path
from fastgen.pipeline import InputError
from fastgen.pipeline.resume import Journal
try:
    with Journal(Path(sys.argv[1]), {}).locked(overwrite=True) as journal, journal.opened():
        print("written")
except InputError as error:
    print(error)
"""


def _other_run(results: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _OTHER, str(results)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_second_run_into_the_same_results_is_refused(results: Path) -> None:
    text, notes = results.read_bytes(), journal_path(results)
    with interrupted(results, resume=True):
        size = notes.stat().st_size
        assert _other_run(results).startswith(f"Another run is writing {results}")
        assert results.read_bytes() == text and notes.stat().st_size == size
    assert _other_run(results) == "written\n"
    assert results.read_bytes() == b""


# Who else writes to the folder.


@pytest.mark.parametrize("name", ["out.txt.journal", "out.txt.journal.new"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "dangling link", "pipe"])
def test_a_journal_is_no_other_file(tmp_path: Path, name: str, kind: str) -> None:
    """Its name can be foreseen: whoever may write to the folder could have it lead to a file of the user's."""
    mine, place = tmp_path / "mine.txt", tmp_path / name
    if kind == "dangling link":
        place.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        mine.write_text("precious")
        place.symlink_to(mine) if kind == "symbolic link" else place.hardlink_to(mine)
    if name.endswith(".new"):  # what a killed run may leave is replaced
        with begun(tmp_path / "out.txt", resume=False) as (journal, _):
            write(journal)
        assert not place.exists() and not place.is_symlink()
    else:
        with (
            pytest.raises(InputError, match=f"Cannot write .*{name}, beside .*: it "),
            begun(tmp_path / "out.txt", resume=False),
        ):
            pass
        assert not (tmp_path / "out.txt").exists()
    assert mine.read_text() == "precious" if kind in ("symbolic link", "hard link") else not mine.exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can make files of another user")
def test_a_journal_of_another_user_is_refused(results: Path) -> None:
    os.chown(journal_path(results), 12345, 12345)
    with pytest.raises(InputError, match="it belongs to another user"), begun(results, resume=True):
        pass


def test_nobody_else_reads_a_journal(results: Path, finished: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in (journal_path(results), journal_path(finished))} == {0o600}


def test_a_system_that_replaces_no_open_files(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows the journal, which is locked and so open, can't be replaced by another file."""
    monkeypatch.setattr(resume, "_REPLACES_OPEN_FILES", False)
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("the journal is open"))
    with begun(results, resume=True):
        pass
    assert inspect(results).complete
    assert results.read_text("utf-8") == "".join(BATCHES)
    assert [list(json.loads(line)) for line in journal_path(results).read_bytes().splitlines()] == [
        ["settings"],
        ["done", "crc", "facts"],
    ]
