"""Manages the folder of a run: a part for each block, and a mark for each complete part.

A part is written under another name, renamed, and then marked; so if a writer dies at any point, or two write the same
block, there is one complete part or none. Readers of such folders (Ray, Spark, pyarrow) skip names that begin with `_`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyarrow import fs

from fastgen.distributed import blocks
from fastgen.files import private_folder
from fastgen.pipeline import remote
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.resume import differences
from fastgen.pipeline.transformers import records
from fastgen.pipeline.transformers.failures import Policy

SETTINGS, _MARKS = "_settings.json", "_done"
# `score` is null if there is none; `id` is JSON if the input's id is no string.
SCHEMA = pyarrow.schema(
    [
        ("file", pyarrow.string()),
        ("line", pyarrow.int64()),
        ("id", pyarrow.string()),
        ("outputs", pyarrow.list_(pyarrow.struct([("text", pyarrow.string()), ("score", pyarrow.float64())]))),
        ("error", pyarrow.string()),
    ]
)
Outputs = list[tuple[str, float | None]]


@dataclass(frozen=True)
class Mark:
    """The record of a complete part: what it holds, and what was read."""

    size: int  # bytes
    crc: int
    count: int  # records
    failed: int
    tokens: int
    errors: list[str]  # the first few
    block: list[Any]  # identifies the input that was read


class Parts:
    """The parts of a run, in the folder at a path or URI."""

    def __init__(self, path: str, form: str, *, private: bool = False) -> None:
        """`private`: the folder is for this user alone."""
        self._private = private
        self.path, self.form = path if "://" in path else os.path.abspath(path), form
        self._fs, self._folder = blocks.opened(path)
        self._shown = remote.shown(self.path)

    def begin(
        self, settings: dict[str, Any], corpus: list[blocks.Block], *, resume: bool, overwrite: bool
    ) -> dict[int, Mark]:
        """Prepare the folder; returns the marks of blocks that need not be done again, by number.

        Raises:
            InputError: the folder is another run's, or has an earlier run's parts and neither option is given.
        """
        settings = json.loads(json.dumps(settings, default=str))
        try:
            if self._private:
                private_folder(Path(self.path))
            known = self._read(SETTINGS)
            if known is None and [name for name in self._names("") if not name.startswith("_")]:
                raise InputError(f"{self._shown} is not empty, and no run wrote it: choose another folder.")
            if known is not None and overwrite:
                self._empty()
                known = None
            if known is not None and not resume:
                raise InputError(
                    f"{self._shown} has an earlier run's parts: --resume goes on with them, --overwrite replaces them."
                )
            if known is None:
                self._fs.create_dir(f"{self._folder}/{_MARKS}", recursive=True)
                self._write(SETTINGS, json.dumps(settings).encode())
                return {}
            try:
                before = json.loads(known)
            except ValueError:
                raise InputError(
                    f"Cannot resume: {self._shown}/{SETTINGS} is damaged; --overwrite starts again."
                ) from None
            if different := differences(before, settings):
                raise InputError(
                    f"Cannot resume {self._shown}: it was begun with another {different}; --overwrite starts again."
                )
            for name in self._names(""):
                if name.startswith("_writing."):  # left by writers that died
                    self._fs.delete_file(f"{self._folder}/{name}")
            marks = {f"{_MARKS}/{name}" for name in self._names(_MARKS)}
            marked = [block for block in corpus if _mark_name(block.number) in marks]
            found = {block.number: mark for block in marked if (mark := self.mark(block)) is not None}
            keep = {name for number in found for name in (self.name(number), _mark_name(number))}
            for name in [*self._parts(), *marks]:
                if name not in keep:  # parts of lines that the input no longer has, or that have changed
                    self._fs.delete_file(f"{self._folder}/{name}")
            return found
        except OSError as error:
            why = remote.without_secrets(error.strerror or first_line(error))
            raise InputError(f"Cannot use {self._shown}: {why}; remove it, or choose another output.") from error

    def exist(self) -> bool:
        """Whether a run has begun here."""
        return self._read(SETTINGS) is not None

    def mark(self, block: blocks.Block) -> Mark | None:
        """The mark of a block's part; None if there is none, or the part or the input has changed since."""
        try:
            mark = Mark(**json.loads(self._read(_mark_name(block.number)) or b""))
        except (ValueError, TypeError):
            return None
        if mark.block != _identity(block):
            return None
        part = self._read(self.name(block.number))
        return mark if part is not None and (len(part), zlib.crc32(part)) == (mark.size, mark.crc) else None

    def name(self, number: int) -> str:
        return f"part-{number:06}.{'txt' if self.form == records.TEXT else self.form}"

    def write(
        self, block: blocks.Block, done: list[tuple[records.Record, Outputs]], tokens: int, policy: Policy
    ) -> Mark:
        """Write the part of a block, and the mark, which is returned."""
        data = _rendered([pair for pair in done if not policy.leaves_out(pair[0])], self.form)
        errors = [record.error for record, _ in done if record.error is not None]
        crc = zlib.crc32(data)
        mark = Mark(len(data), crc, len(done), len(errors), tokens, errors[:10], _identity(block))
        self._write(self.name(block.number), data)
        self._write(_mark_name(block.number), json.dumps(asdict(mark)).encode())
        return mark

    def read(self, number: int, mark: Mark) -> bytes:
        """Read a part; InputError if it is not as the mark says."""
        part = self._read(self.name(number))
        if part is None or (len(part), zlib.crc32(part)) != (mark.size, mark.crc):
            raise InputError(f"{self._shown}/{self.name(number)} is gone or has changed: --resume makes it again.")
        return part

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_dir(self._folder)

    def _empty(self) -> None:
        """Remove all that a run has written in the folder, and nothing else."""
        for name in [*self._parts(), *(name for name in self._names("") if name.startswith("_writing."))]:
            self._fs.delete_file(f"{self._folder}/{name}")
        self._fs.delete_dir(f"{self._folder}/{_MARKS}")
        self._fs.delete_file(f"{self._folder}/{SETTINGS}")

    def _parts(self) -> list[str]:
        return [name for name in self._names("") if name.startswith("part-")]

    def _names(self, folder: str) -> list[str]:
        selector = fs.FileSelector(f"{self._folder}/{folder}".rstrip("/"), allow_not_found=True)
        return [info.base_name for info in self._fs.get_file_info(selector)]

    def _read(self, name: str) -> bytes | None:
        try:
            with self._fs.open_input_file(f"{self._folder}/{name}") as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes) -> None:
        writing = f"{self._folder}/_writing.{uuid.uuid4().hex}"
        with self._fs.open_output_stream(writing) as file:
            file.write(data)
        self._fs.move(writing, f"{self._folder}/{name}")


def _identity(block: blocks.Block) -> list[Any]:
    """The properties of a block on which the part depends."""
    return [block.first, block.before, block.count, block.name, block.file, block.stamp]


def _mark_name(number: int) -> str:
    return f"{_MARKS}/{number:06}.json"


def _rendered(done: list[tuple[records.Record, Outputs]], form: str) -> bytes:
    if form == records.PARQUET:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(_rows(done)), SCHEMA), buffer)
        return buffer.getvalue()
    return "".join(records.render(record, found, form) for record, found in done).encode()


def _rows(done: list[tuple[records.Record, Outputs]]) -> Iterator[dict[str, Any]]:
    for record, found in done:
        yield {
            "file": record.file,
            "line": record.line,
            "id": record.name
            if record.name is None or isinstance(record.name, str)
            else json.dumps(record.name, default=str),
            "outputs": None if record.error else listed(found),
            "error": record.error,
        }


def listed(found: Outputs) -> list[dict[str, Any]]:
    """Hypotheses in the form of a row of Parquet or of a Ray dataset."""
    return [{"text": text, "score": score} for text, score in found]
