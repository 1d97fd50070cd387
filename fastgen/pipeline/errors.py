"""Errors for the user to act on, and the exit codes of the commands."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from fastgen import installing

DONE = 0
INPUT_ERROR = 1
# For commands that compare, fastgen-bench, fastgen-check and fastgen-demo: an output differs; the input is unusable.
DIFFERENT, UNUSABLE = 1, 2
INTERRUPTED = 130  # 128 + SIGINT, as in shells

EXIT_CODES = (
    f"exit codes: {DONE} done; {INPUT_ERROR} input error (a file, a line, a flag, a full disk: one sentence on "
    f"standard error says which; what was finished is kept); {INTERRUPTED} interrupted (Ctrl-C, SIGTERM)"
)
_GLOBAL = re.compile(r"GLOBAL (\S+)")  # what torch's errors call a function or class


class InputError(Exception):
    """Raised if the run can't go on for a reason outside the program; the message is one sentence for the user."""


class UnwritableError(InputError):
    """Raised if a file of ours can't be written, such as on a full disk."""


@contextlib.contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into an InputError: `what` is needed, and fastgen's `extra` installs it."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{what} is needed: {installing.command(extra)} ({first_line(error)}).") from error


def tell(text: str) -> None:
    """Write a line to standard error. A terminal that was closed, or a reader that has gone, ends no run."""
    if sys.stderr is not None:  # None for a program without a console, and behind `2>&-`
        with contextlib.suppress(OSError, ValueError):  # the latter if it has been closed
            print(text, file=sys.stderr, flush=True)


class WorkerError(RuntimeError):
    """Raised if a task failed in a worker, or always killed it; the message ends in the worker's traceback."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, "1 record" or "2 records"."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def is_utf8(text: str) -> bool:
    """Whether a text can be written in UTF-8: of bytes that are none, Python makes halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def writable(text: str) -> str:
    """A text that can be written in UTF-8: of the name of a file that is none, the other bytes are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(error: BaseException) -> str:
    """The first line of the message of `error`, without the full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def why_unloadable(error: BaseException) -> str:
    """Why a checkpoint can't be loaded: the first line of `error`, or our own words if torch refuses to unpickle it.

    torch's message tells how to switch the check off, after which the checkpoint could run any code.
    """
    cause: BaseException | None = error
    while cause is not None and "Weights only load failed" not in str(cause):  # hosts wrap it
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return first_line(error)
    found = _GLOBAL.search(str(cause))
    what = f"it names {found[1]}, which" if found else "it holds more than weights, which"
    return f"{what} could run any code here; ask for the weights alone, as safetensors or a state dict"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failed write, such as on a full disk, into an InputError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UnwritableError(f"Cannot write {os.fspath(path)}: {reason}; what was finished before is kept.") from error
