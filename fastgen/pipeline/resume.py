"""Writes a results file and a journal beside it, which says how much is complete and what a resumed run must know.

A batch's lines go to the results file first, then one line goes to the journal. So after a kill at any point the file
is cut back to the state of the journal's last whole line, and the run goes on from there. When a run has finished, the
journal keeps the settings and a line that says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from fastgen import config
from fastgen.files import open_own
from fastgen.pipeline.errors import InputError, writing
from fastgen.pipeline.lock import locked

OTHER_DIGITS = "scores may differ in their last digits from those of a run that never stopped; texts do not."
_REPLACES_OPEN_FILES = sys.platform != "win32"


def precision() -> dict[str, str]:
    """What decides a run's output and is no setting of the run: weights in fewer bits, if they were chosen."""
    weights = config.current().weights
    return {} if weights == "float32" else {"FASTGEN_WEIGHTS": weights}


def other_texts() -> str | None:
    """What to say if texts may differ from the host's by the user's choice."""
    weights = config.current().weights
    if weights == "float32":
        return None
    word = config.WORDS_OF_WEIGHTS[weights]
    return f"linear layers have weights in {word} (FASTGEN_WEIGHTS={weights}), so texts may differ from the host's."


class _Kept(NamedTuple):
    """How much of an earlier run's files is valid."""

    journal_bytes: int = 0
    bytes: int = 0  # of the results
    crc: int = 0


class Journal:
    """Writes the results, and ``<results>.journal``: a header with the settings, then a line for every batch."""

    def __init__(self, results: Path, settings: Mapping[str, Any]) -> None:
        self.results = results
        self.path = journal_path(results)
        self.complete = False  # the run to resume has finished
        self.facts: dict[str, Any] = {}  # kept when a run has finished
        self._replaces = False  # whether existing results may be replaced
        self._settings = json.loads(json.dumps(settings, default=str))
        self._kept = _Kept()
        self._notes: BinaryIO
        self._raw: _Counted
        self._file: TextIO

    @property
    def resuming(self) -> bool:
        """Whether an earlier run left something to resume."""
        return self._kept.journal_bytes > 0

    @contextlib.contextmanager
    def locked(self, *, resume: bool = False, overwrite: bool = False) -> Iterator[Journal]:
        """Lock the files against other runs; nothing is changed yet.

        Args:
            resume: read what an earlier run left, to go on with it.
            overwrite: existing results may be replaced.

        Raises:
            InputError: there are results and neither option is given, or the results can't be resumed.
        """
        check_flags(resume=resume, overwrite=overwrite)
        with locked(self.path, self.results) as self._notes:
            self._replaces = overwrite
            if self.results.exists():
                if resume:
                    self._inspect()
                    self._replaces = True  # the part after the last note
                elif not overwrite and (self.results.stat().st_size or self._has_results()):
                    raise self._in_the_way()
            yield self

    def _has_results(self) -> bool:
        """Whether a run has noted results; the file is locked even while it is empty."""
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
        """The notes of an earlier run, batch by batch; call it before `opened`. InputError if they can't be used."""
        try:
            yield (record for end, record in self._lines() if "bytes" in record and end <= self._kept.journal_bytes)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._damaged() from error

    @contextlib.contextmanager
    def opened(self) -> Iterator[TextIO]:
        """Open the results, cut back to the valid part. If the block ends without exception, the run has finished."""
        with writing(self.results):
            self._raw = _Counted(self.results, self._kept.bytes, self._kept.crc)
        size = os.fstat(self._raw.fileno()).st_size
        if size and not self._replaces:  # another process has written it since the run began
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
            with contextlib.suppress(OSError):  # the disk may be full again: what was written stays
                self._file.close()
            raise
        with writing(self.results):
            self._file.close()
        self._finish()

    def write(self, text: str) -> None:
        """Write all of `text` to the results, or raise InputError."""
        with writing(self.results):
            self._file.write(text)
            self._file.flush()

    def batch(self, **facts: Any) -> None:
        """Note that the results are complete up to here, with `facts`."""
        size, crc = self._raw.written
        with writing(self.path):
            self._notes.write(_line({"bytes": size, "crc": crc, **facts}))
            self._notes.flush()

    def _finish(self) -> None:
        size, crc = self._raw.written
        done = {"done": size, "crc": crc, "facts": self.facts}
        lines = _line({"settings": self._settings}) + _line(done)
        new = self.path.with_name(self.path.name + ".new")
        with writing(self.path):
            if not _REPLACES_OPEN_FILES:
                self._notes.truncate(0)
                self._notes.write(lines)
                self._notes.flush()
                return
            new.unlink(missing_ok=True)  # left by a run that was killed here
            with os.fdopen(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(lines)
            new.replace(self.path)  # atomic: a kill leaves the old or the new file

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
            if place > size and not self.complete:  # a crash of the whole machine lost some results
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
        """Each whole line of the journal: the place where it ends, and its record."""
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
    """A file opened for appending that counts its bytes and their CRC, in `written`."""

    def __init__(self, path: Path, size: int, crc: int) -> None:
        """`size` and `crc`: of the valid part of the file."""
        super().__init__(path, "a", opener=lambda name, flags: os.open(name, flags, 0o666))
        self.written = size, crc

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        size, crc = self.written
        self.written = size + count, zlib.crc32(memoryview(data)[:count], crc)
        return count


def check_flags(*, resume: bool, overwrite: bool) -> None:
    """Raise InputError for flags that contradict each other."""
    if resume and overwrite:
        raise InputError("--resume goes on with an earlier run, --overwrite replaces it: give one of them.")


def journal_path(results: Path) -> Path:
    return results.with_name(results.name + ".journal")


def files_beside(results: str) -> set[Path]:
    """The results of a run, and the files that it writes beside them."""
    return {Path(f"{results}{ending}").absolute() for ending in ("", ".journal", ".journal.new")}


def contents(*files: Path) -> dict[str, Any]:
    """Settings that change when one of these files changes: sizes and times."""
    stats = {file: file.stat() for file in files}
    return {f"content of {file}": [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"  # paths may be no UTF-8


def _crc(path: Path, size: int) -> int:
    """The CRC of the first `size` bytes of a file."""
    crc = 0
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(size, 1 << 20))):
            crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of the settings that differ, as text for the user; "" if none does."""
    return ", ".join(sorted(differing(before, now)))


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the settings that differ."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
