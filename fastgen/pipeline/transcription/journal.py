"""Which files of a run are finished: a line of JSON for each, beside the outputs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import InputError, writing
from fastgen.pipeline.lock import locked
from fastgen.pipeline.resume import precision
from fastgen.version import __version__

NAME = ".fastgen-transcribe.jsonl"


class Journal:
    """The journal of a run in `folder`, locked while it is open."""

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool) -> None:
        """`settings`: what outputs depend on, as JSON has it; `resume`: go on with a journal, if there is one.

        Raises:
            InputError: another run is at work here, or the run to be resumed was begun with other settings.
        """
        self._path = folder / NAME
        self._done: dict[str, Any] = {}
        self._settings = json.loads(json.dumps({"fastgen": __version__, **settings, **precision()}))
        self.resumes = resume and self._path.exists()

    def __enter__(self) -> Journal:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(locked(self._path, self._path.parent))
            if self.resumes:
                self._read()
            else:
                self._file.truncate(0)
                self._append({"settings": self._settings})
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def has(self, file: Path, outputs: list[Path]) -> bool:
        """Whether a file is finished: it and the outputs are as they were when it was noted."""
        return self._done.get(str(file), ()) == _looks(file, outputs) is not None

    def add(self, file: Path, outputs: list[Path]) -> None:
        """Note that a file is finished."""
        self._append({"file": str(file), "looks": _looks(file, outputs)})

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a killed run may have left half a line
        self._file.truncate(len(whole))
        try:
            header, *lines = map(json.loads, whole.splitlines())
            begun = header["settings"]
            self._done = {line["file"]: line["looks"] for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"Cannot resume: {self._path} is not a journal of this command.") from error
        for name in {**begun, **self._settings}:
            if begun.get(name) != self._settings.get(name):
                raise InputError(
                    f"Cannot resume: the run was begun with another {name} ({begun.get(name)!r}, not "
                    f"{self._settings.get(name)!r}); --overwrite begins anew."
                )

    def _append(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()


def _looks(file: Path, outputs: list[Path]) -> Any:
    """Size and time of a file, and the sizes of the outputs; None if one is not there. Of standard input nothing."""
    try:
        stat = None if str(file) == "-" else os.stat(file)
        return [stat and [stat.st_size, stat.st_mtime_ns], [path.stat().st_size for path in outputs]]
    except OSError:
        return None
