"""Writes lines and log lines to standard output, or to the file of --results-path."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from fastgen.pipeline.errors import InputError, writable, writing
from fastgen.pipeline.resume import Journal


class Output:
    """Standard output, or a results file, which is not changed until `opened`."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        self._early = io.StringIO()  # log lines from before the results are opened
        self.log: TextIO = sys.stdout if journal is None else self._early

    @contextlib.contextmanager
    def opened(self, handler: logging.StreamHandler[Any]) -> Iterator[None]:
        """Inside the block, results can be written; log lines go where `handler` sends them."""
        if self.journal is None:
            yield
            return
        with self.journal.opened() as file:
            if handler.stream is self._early:
                handler.setStream(file)
            # If the run is resumed, the results already contain the log lines of loading.
            (sys.stderr if self.journal.resuming else file).write(self._early.getvalue())
            yield

    def write(self, text: str) -> None:
        """Write all of `text`, or raise InputError."""
        if self.journal is not None:
            self.journal.write(text)
            return
        try:
            with writing("standard output"):
                sys.stdout.write(text)
                sys.stdout.flush()
        except UnicodeEncodeError as error:
            lacking = f"Standard output is {sys.stdout.encoding}, which lacks {error.object[error.start]!a}"
            raise InputError(f"{lacking}: set PYTHONUTF8=1, or give --results-path.") from error

    def note(self, **facts: Any) -> None:
        """Note in the journal that everything up to here is written, with `facts`."""
        if self.journal is not None:
            self.journal.batch(**facts)


class _Handler(logging.StreamHandler):  # generic only since Python 3.11
    def format(self, record: logging.LogRecord) -> str:
        """The line as UTF-8 can have it: the settings have paths."""
        return writable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: if a log line can't be written, a result can't either, and that ends the run."""


@contextlib.contextmanager
def logging_to(results: TextIO) -> Iterator[logging.StreamHandler[Any]]:
    """Log in the form of fairseq-generate, and to the same stream.

    It is meant to log to the results, but if an import has set up logging before (in fairseq 0.12.3.1 one does, unless
    tensorboardX is installed) it logs to standard error.
    """
    root = logging.getLogger()
    handler = _Handler(sys.stderr if root.handlers else results)
    handler.setFormatter(
        logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    before, level = list(root.handlers), root.level
    for other in before:
        if type(other) is logging.StreamHandler:  # the import's, which would log all again, hydra's lines, too
            root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield handler
    finally:
        root.setLevel(level)
        root.handlers[:] = before
