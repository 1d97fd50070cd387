"""Which files of a run are finished: a line of JSON for each, beside the outputs."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import InputError, writing
from fastgen.pipeline.lock import locked
from fastgen.pipeline.resume import differing, precision
from fastgen.version import __version__

NAME = ".fastgen-transcribe.jsonl"
STANDARD_INPUT = Path("-")


def stem(file: Path) -> str:
    """What the outputs of a file are called, as whisper's command calls them."""
    return "stdin" if file == STANDARD_INPUT else file.stem


class Journal:
    """The journal of runs in `folder`, locked while it is open: a line for each file that is begun, and one when it is
    done. Runs with other settings begin a new one."""

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool) -> None:
        """`settings`: what outputs depend on, as JSON has it; `resume`: go on with a journal, if there is one.

        Raises:
            InputError: another run is at work here, or the run to be resumed was begun with other settings.
        """
        self._path, self._resume = folder / NAME, resume
        self._begun: set[str] = set()
        self._done: dict[str, Any] = {}
        self._is_ours = False  # it was begun with these settings
        self._settings = json.loads(json.dumps({"fastgen": __version__, **settings, **precision()}))

    def __enter__(self) -> Journal:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(locked(self._path, self._path.parent))
            self._read()
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def has(self, file: Path, outputs: list[Path]) -> bool:
        """Whether a file is done, in a run that is resumed: it and the outputs are as they were then."""
        if not self._resume or _name(file) not in self._done:
            return False
        now = self.looks_of(file)
        return now is not None and self._done[_name(file)] == [now, _sizes(outputs)]

    def knows(self, file: Path) -> bool:
        """Whether a run with these settings has begun to write outputs of this file."""
        return _name(file) in self._begun

    def begin(self) -> None:
        """Note the settings, once nothing stands in the way of the run; a journal with others is replaced."""
        if not self._is_ours:
            self._file.truncate(0)
            self._append({"settings": self._settings})

    def note_begun(self, file: Path) -> None:
        """Note that outputs of a file are about to be written."""
        self._append({"begun": _name(file)})

    def note_done(self, file: Path, source: Any, outputs: list[Path]) -> None:
        """Note that a file is done; `source`: what `looks_of` said before it was read."""
        self._append({"done": _name(file), "looks": [source, _sizes(outputs)]})

    @staticmethod
    def looks_of(file: Path) -> Any:
        """Size and time of a file; None if it is not there, or if nothing is known of what it will hold.

        That is so of standard input, pipes and devices: these are never done.
        """
        try:
            found = None if file == STANDARD_INPUT else os.stat(file)
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns] if found is not None and stat.S_ISREG(found.st_mode) else None

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a killed run may have left half a line
        if not whole:
            return
        try:
            header, *lines = map(json.loads, whole.splitlines())
            before = header["settings"]
            last = {_place(line["begun"]): line["begun"] for line in lines if "begun" in line}
            begun = set(last.values())  # outputs are of the file that was begun last, of those that are called alike
            done = {line["done"]: line["looks"] for line in lines if "done" in line and line["done"] in begun}
            is_placed = all(name == "-" or os.path.isabs(name) for name in (*begun, *done))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._path} is not a journal of this command: remove it.") from error
        if not is_placed:
            if self._resume:
                raise InputError(
                    f"Cannot resume: {self._path} does not say in which folders its files are, as it is of an earlier "
                    "version; --overwrite, without --resume, begins anew."
                )
            return
        names = differing(before, self._settings)
        if names and self._resume:
            name = names[0]
            raise InputError(
                f"Cannot resume: the run was begun with another {name} ({before.get(name)!r}, not "
                f"{self._settings.get(name)!r}); --overwrite, without --resume, begins anew."
            )
        if not names:
            self._file.truncate(len(whole))
            self._begun, self._done, self._is_ours = begun, done, True

    def _append(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()


def _sizes(outputs: list[Path]) -> Any:
    """The sizes of files; None if one is not there."""
    try:
        return [path.stat().st_size for path in outputs]
    except OSError:
        return None


def _name(file: Path) -> str:
    """What the journal calls a file: the same wherever a run is started."""
    return str(file) if file == STANDARD_INPUT else os.path.abspath(file)


def _place(name: str) -> str:
    """Where the outputs of a file of this name go; some file systems take A.txt and a.txt for the same file."""
    return stem(Path(name)).casefold()
