"""How the commands end: one sentence on standard error for what the user can change, and a documented exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import fastgen
from fastgen.pipeline.errors import INPUT_ERROR, INTERRUPTED, InputError, WorkerError, first_line, tell

TRACEBACK = "FASTGEN_TRACEBACK"  # environment variable: 1 shows where an error came from


def exit_code(name: str, command: Callable[[], int], input_error: int = INPUT_ERROR) -> int:
    """What `command` returns, or the exit code of the error that it raises."""
    _occupy_standard_streams()
    try:
        with _terminated_as_interrupted():
            return command()
    except InputError as error:
        tell(f"{name}: {error}")
        return input_error
    except WorkerError as error:
        tell(f"{name}: {first_line(error)}.{_trace(str(error))}")
        return input_error
    except fastgen.FallbackError as error:
        tell(f"{name}: FASTGEN_STRICT is set, and fastgen cannot accelerate this: {error}.")
        return input_error
    except KeyboardInterrupt:
        tell(f"{name}: interrupted; what was finished is kept.")
        return INTERRUPTED
    except Exception as error:  # what nobody foresaw: no less a sentence, and a code that scripts know
        kind, what = type(error).__name__, first_line(error)
        sentence = kind if what == kind else f"{kind}: {what}"
        tell(f"{name}: {sentence}.{_trace(traceback.format_exc())}")
        return input_error
    finally:
        _give_up_broken_output()


def refuse_arguments(message: str) -> NoReturn:
    """argparse's `error`, as a sentence without the long usage."""
    raise InputError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists the flags.")


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses bad arguments as `refuse_arguments` does."""

    def error(self, message: str) -> NoReturn:
        refuse_arguments(message)


def whole_number(text: str) -> int:
    """An argument of argparse that is 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive_number(text: str) -> int:
    """An argument of argparse that is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def share(text: str) -> float:
    """An argument of argparse: of a machine's processors, how many."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return found


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, as batch systems send it, ends a run like Ctrl-C: what is finished is written first."""
    if threading.current_thread() is not threading.main_thread():  # only there may signals be set
        yield
        return

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _trace(text: str) -> str:
    """`text`, a traceback, on lines of its own if it is wanted; else how to see it."""
    return f"\n{text.rstrip()}" if os.environ.get(TRACEBACK) == "1" else f" ({TRACEBACK}=1 shows where.)"


def _occupy_standard_streams() -> None:
    """Open what is closed (`2>&-`): a file of the run in its place would get all that is written to standard error."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one


def _give_up_broken_output() -> None:
    """Python flushes its output once more when it ends; if that failed, the exit code would be another."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # a program without a console, or `>&-`
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
