"""How the commands end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastgen
from fastgen.cli.exits import exit_code
from fastgen.pipeline import InputError, WorkerError


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
