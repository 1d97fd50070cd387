"""A results file and the journal beside it, which says how much of it is complete and what the rest needs to know.

A batch's lines go to the results file first, then one line goes to the journal. So after a kill at any point the file
is cut back to the journal's last whole line, and the run goes on from there. Of a finished run the journal keeps the
settings and a line that says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from fastgen.files import open_own
from fastgen.pipeline.errors import InputError, writing
from fastgen.pipeline.lock import locked

OTHER_DIGITS = "scores may differ in their last digits from those of a run that never stopped; texts do not."


class _Kept(NamedTuple):
    """What an earlier run left that stands."""

    journal_bytes: int = 0
    bytes: int = 0  # of the results
    crc: int = 0


class Journal:
    """Writes the results, and ``<results>.journal``: a header with the run's settings, then a line for every batch."""

    def __init__(self, results: Path, settings: Mapping[str, Any]) -> None:
        self.results = results
        self.path = journal_path(results)
        self.complete = False  # the run that --resume names was finished
        self.facts: dict[str, Any] = {}  # kept of a finished run
        self._replaces = False  # what is there
        self._settings = json.loads(json.dumps(settings, default=str))
        self._kept = _Kept()
        self._notes: BinaryIO
        self._raw: _Counted
        self._file: TextIO

    @property
    def resuming(self) -> bool:
        """Whether an earlier run left something to go on from."""
        return self._kept.journal_bytes > 0

    @contextlib.contextmanager
    def locked(self, *, resume: bool = False, overwrite: bool = False) -> Iterator[Journal]:
        """Keep other runs out; nothing is changed yet.

        Args:
            resume: see what an earlier run left, to go on with it.
            overwrite: results that are there may be replaced.

        Raises:
            InputError: there are results, and neither is said; or they can't be gone on with.
        """
        if resume and overwrite:
            raise InputError("--resume goes on with an earlier run, --overwrite replaces it: give one of them.")
        with locked(self.path, self.results) as self._notes:
            self._replaces = overwrite
            if self.results.exists():
                if resume:
                    self._inspect()
                    self._replaces = True  # what stands behind the last note
                elif not overwrite and (self.results.stat().st_size or self._has_results()):
                    raise self._in_the_way()
            yield self

    def _has_results(self) -> bool:
        """Whether a run has noted some; of a file that is empty, others can wait here for their turn."""
        return any("bytes" in record or "done" in record for _, record in self._lines())

    def _in_the_way(self) -> InputError:
        if os.fstat(self._notes.fileno()).st_size:
            return InputError(
                f"{self.results} holds what an earlier run wrote: --resume goes on with it, --overwrite replaces it."
            )
        return InputError(
            f"{self.results} exists, and there is no journal of a run that wrote it: --overwrite replaces it."
        )

    @contextlib.contextmanager
    def earlier(self) -> Iterator[Iterator[dict[str, Any]]]:
        """What the earlier run noted, batch after batch; before `opened`. InputError if it can't be used."""
        try:
            yield (record for end, record in self._lines() if "bytes" in record and end <= self._kept.journal_bytes)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._damaged() from error

    @contextlib.contextmanager
    def opened(self) -> Iterator[TextIO]:
        """The results, cut back to what stands. The run counts as finished at the end, if no exception ends it."""
        with writing(self.results):
            self._raw = _Counted(self.results, self._kept.bytes, self._kept.crc)
        size = os.fstat(self._raw.fileno()).st_size
        if size and not self._replaces:  # somebody has written it since the run began
            self._raw.close()
            raise self._in_the_way()
        with writing(self.path):
            self._notes.truncate(self._kept.journal_bytes)
            if not self.resuming:
                self._notes.write(_line({"settings": self._settings}))
            self._notes.flush()
        with writing(self.results):
            if size != self._kept.bytes:
                self._raw.truncate(self._kept.bytes)
            self._file = io.TextIOWrapper(io.BufferedWriter(self._raw), encoding="utf-8", newline="\n")
        try:
            yield self._file
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk again: what is on it stands
                self._file.close()
            raise
        with writing(self.results):
            self._file.close()
        self._finish()

    def write(self, text: str) -> None:
        """All of `text` to the results, or InputError."""
        with writing(self.results):
            self._file.write(text)
            self._file.flush()

    def batch(self, **facts: Any) -> None:
        """The results are complete up to here, and the `facts` hold."""
        size, crc = self._raw.written
        with writing(self.path):
            self._notes.write(_line({"bytes": size, "crc": crc, **facts}))
            self._notes.flush()

    def _finish(self) -> None:
        size, crc = self._raw.written
        done = {"done": size, "crc": crc, "facts": self.facts}
        new = self.path.with_name(self.path.name + ".new")
        with writing(self.path):
            new.unlink(missing_ok=True)  # of a run that was killed here
            with os.fdopen(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(_line({"settings": self._settings}) + _line(done))
            new.replace(self.path)  # at once: a kill leaves the one or the other

    def _inspect(self) -> None:
        lines = self._lines()
        _, header = next(lines, (0, None))
        if header is None and not os.fstat(self._notes.fileno()).st_size:
            raise InputError(f"Cannot resume: there is no {self.path}; --overwrite starts again.")
        if header is None or not isinstance(header.get("settings"), dict):
            raise InputError(f"Cannot resume: {self.path} is not a journal; --overwrite starts again.")
        if different := differences(header["settings"], self._settings):
            raise InputError(
                f"Cannot resume {self.results}: it was begun with another {different}; --overwrite starts again."
            )
        size, kept = self.results.stat().st_size, _Kept()
        for end, record in lines:
            self.complete = "done" in record
            place, crc = record.get("done", record.get("bytes")), record.get("crc")
            facts = record.get("facts", {})
            if not isinstance(place, int) or not isinstance(crc, int) or not isinstance(facts, dict):
                raise self._damaged()
            if place > size and not self.complete:  # a crash of the whole machine lost some
                break
            kept, self.facts = _Kept(end, place, crc), facts
            if self.complete:
                break
        if (self.complete and kept.bytes != size) or _crc(self.results, kept.bytes) != kept.crc:
            raise InputError(
                f"Cannot resume: {self.results} was changed since the run wrote it; --overwrite starts again."
            )
        self._kept = kept

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Where each whole line ends, and what it says."""
        self._notes.seek(0)
        end = 0
        while (line := self._notes.readline()).endswith(b"\n"):  # the last one is cut off, or empty
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # a crash of the whole machine can leave anything at the end
                return
            if not isinstance(record, dict):
                raise self._damaged()
            end += len(line)
            yield end, record

    def _damaged(self) -> InputError:
        return InputError(f"Cannot resume: the journal {self.path} is damaged; --overwrite starts again.")


class _Counted(io.FileIO):
    """A file opened for appending, and the number and CRC of its bytes, `written`."""

    def __init__(self, path: Path, size: int, crc: int) -> None:
        """`size` and `crc` are those of what stands in the file."""
        super().__init__(path, "a", opener=lambda name, flags: os.open(name, flags, 0o666))
        self.written = size, crc

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        size, crc = self.written
        self.written = size + count, zlib.crc32(memoryview(data)[:count], crc)
        return count


def journal_path(results: Path) -> Path:
    return results.with_name(results.name + ".journal")


def contents(*files: Path) -> dict[str, Any]:
    """Settings that tell whether one of these files is another than it was."""
    stats = {file: file.stat() for file in files}
    return {f"content of {file}": [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"  # paths may be no UTF-8


def _crc(path: Path, size: int) -> int:
    """The CRC of the first `size` bytes."""
    crc = 0
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(size, 1 << 20))):
            crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of the settings that differ, to be shown; "" if none does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(sorted(names))
