"""Errors of a run that the user can act on, and the exit codes of the commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

DONE = 0
INPUT_ERROR = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

EXIT_CODES = (
    f"exit codes: {DONE} done; {INPUT_ERROR} input error (a file, a line, a flag, a full disk: one sentence on "
    f"standard error says which; what was finished is kept); {INTERRUPTED} interrupted (Ctrl-C, SIGTERM)"
)


class InputError(Exception):
    """The run can't go on, for a reason outside the program; the message is one sentence for the user."""


class WorkerError(RuntimeError):
    """A task failed in a worker, or its worker died every time; the message ends in the worker's traceback."""


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failed write, such as on a full disk, into an InputError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise InputError(f"Cannot write {os.fspath(path)}: {reason}; what was finished before is kept.") from error
