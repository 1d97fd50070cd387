"""How the commands end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fastgen
from fastgen import installing
from fastgen.cli.exits import exit_code
from fastgen.pipeline import InputError, WorkerError
from fastgen.pipeline.errors import DIFFERENT, DONE, INPUT_ERROR, INTERRUPTED, UNUSABLE

pytestmark = pytest.mark.always  # also where CI draws a part of the tests


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (InputError("There is no file x."), 1, "do: There is no file x."),
        (WorkerError("post-processing failed: E\ntrace"), 1, "do: post-processing failed: E."),
        (fastgen.FallbackError("hooks watch its attention"), 1, "do: FASTGEN_STRICT is set"),
        (KeyboardInterrupt(), 130, "do: interrupted; what was finished is kept."),
    ],
)
def test_errors_have_a_sentence_and_a_code(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert exit_code("do", fail) == code
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.parametrize("traceback", [False, True])
def test_other_errors_are_a_sentence_too_and_their_traceback_can_be_had(
    traceback: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_TRACEBACK", "1" if traceback else "0")
    assert exit_code("do", lambda: 1 // 0) == 1
    sentence, *trace = capsys.readouterr().err.splitlines()
    assert sentence.startswith("do: ZeroDivisionError: ")
    assert bool(trace) is traceback and any("1 // 0" in line for line in trace) is traceback


def test_sigterm_is_an_interrupt_while_the_command_runs() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminate() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert exit_code("do", terminate) == 130
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_does_not_change_the_exit_code() -> None:
    code = """
import sys
from fastgen.cli.exits import exit_code
from fastgen.pipeline.errors import writing
def command():
    with writing("standard output"):
        print("x", flush=True)
sys.exit(exit_code("do", command))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert run.returncode == 1
    assert (
        run.stderr == "do: Cannot write standard output: No space left on device; what was finished before is kept.\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize("outcome", ["0", "1 / 0"])
def test_a_standard_stream_that_is_closed_changes_neither_the_exit_code_nor_a_file(
    closed: str, outcome: str, tmp_path: Path
) -> None:
    code = f"""
import os, sys
from fastgen.cli.exits import exit_code
from fastgen.pipeline.errors import tell
from fastgen.pipeline.progress import Progress
def command():
    tell("a sentence")
    progress = Progress(2)
    progress.update(2, 20)
    progress.close()
    if open(os.devnull).fileno() < 3:
        return 3
    return int({outcome})
sys.exit(exit_code("do", command))
"""
    (tmp_path / "command.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run(
        f'exec "{sys.executable}" "{tmp_path}/command.py" {closed}',
        shell=True, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (int(outcome != "0"), "")


# The table of docs/commands.md.

PAGE = Path(__file__).resolve().parents[2] / "docs/commands.md"
MAINS = {"fastgen-demo": "run"}  # what each command runs, where it is not `_main`


def _table() -> dict[str, set[int]]:
    """The exit codes of each command, by the page."""
    text = PAGE.read_text("utf-8").split("### Exit codes\n\n")[1].split("\n\n")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    found: dict[str, set[int]] = {}
    for column in range(1, len(head)):
        codes = {int(row[0]) for row in rows if row[column] != "–"}
        found |= {name.strip(" `"): codes for name in head[column].split(",")}
    return found


def _commands() -> dict[str, str]:
    """The commands that are installed, and their modules."""
    scripts = next(one for one in metadata.distributions() if one.name == installing.DISTRIBUTION).entry_points
    return {one.name: one.module for one in scripts if one.group == "console_scripts"}


def test_the_page_has_every_command() -> None:
    assert set(_table()) == set(_commands())


@pytest.mark.parametrize("command", sorted(_table()))
def test_what_ends_a_command_has_the_code_of_the_page(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(_commands()[command])
    codes = _table()[command]
    bad_input = UNUSABLE if UNUSABLE in codes else INPUT_ERROR
    assert codes == {DONE, DIFFERENT, INTERRUPTED, bad_input}
    monkeypatch.setattr(sys, "argv", [command])
    for outcome, code in (
        (InputError("There is no file x."), bad_input),
        (fastgen.FallbackError("hooks"), bad_input),
        (ZeroDivisionError("x"), bad_input),
        (KeyboardInterrupt(), INTERRUPTED),
    ):

        def run(*_: object, outcome: BaseException = outcome) -> None:
            raise outcome

        monkeypatch.setattr(module, MAINS.get(command, "_main"), run)
        assert module.main([]) == code
        said = capsys.readouterr().err
        assert said.startswith(f"{command}: ") and said.count("\n") == 1
