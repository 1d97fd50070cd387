"""Where lines and log lines go: standard output, or the file of --results-path."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from fastgen.pipeline.errors import writing
from fastgen.pipeline.resume import Journal


class Output:
    """The results, with a journal beside them if they are a file."""

    def __init__(self, file: TextIO, name: str, journal: Journal | None = None) -> None:
        self.file, self._name, self._journal = file, name, journal

    def write(self, text: str) -> None:
        """All of `text`, or InputError."""
        with writing(self._name):
            self.file.write(text)
            self.file.flush()

    def note(self, **facts: Any) -> None:
        """Into the journal: everything up to here is written, and the `facts` hold."""
        if self._journal is not None:
            self._journal.batch(os.fstat(self.file.fileno()).st_size, **facts)


class _Handler(logging.StreamHandler):  # generic only since Python 3.11
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: where a log line can't be written, a result can't either, and that ends the run."""


@contextlib.contextmanager
def logging_to(results: TextIO) -> Iterator[logging.StreamHandler[Any]]:
    """Log lines as fairseq-generate has them, and where it has them.

    It means to have them among the results, but where an import has set up logging before (in fairseq 0.12.3.1 one
    does, unless tensorboardX is installed) they come out on standard error.
    """
    root = logging.getLogger()
    handler = _Handler(sys.stderr if root.handlers else results)
    handler.setFormatter(
        logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    before, level = list(root.handlers), root.level
    for other in before:
        if type(other) is logging.StreamHandler:  # the import's; it would say everything again, hydra's chatter too
            root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield handler
    finally:
        root.setLevel(level)
        root.handlers[:] = before


def is_finished(results: Path) -> bool:
    """Whether the file ends as fairseq-generate ends it."""
    with open(results, "rb") as file:
        file.seek(max(0, results.stat().st_size - 4096))
        tail = file.read().decode("utf-8", errors="replace").splitlines()
    return any(line.startswith("Generate ") or "| Translated " in line for line in tail[-3:])
