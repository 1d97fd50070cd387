"""Cuts a corpus into blocks, each of which can be read without the others.

A block is as long as the window that `fastgen-generate-transformers` sorts by length, so one process and many make the
same batches of a corpus: texts are the same, samples included, and scores differ as between two runs of one process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
from pyarrow import fs

from fastgen.pipeline import remote
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.transformers.records import PARQUET, Record, check_beginning, fill_text, format_of, parsed

_CHUNK = 1 << 22  # bytes read at once
_ROWS = 4096  # of Parquet, read at once
_NEWLINE = ord("\n")
_OF_PYARROW = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "mock")  # others are fsspec's


@dataclass(frozen=True)
class Block:
    """Up to `batches.WINDOW` records of one file."""

    number: int  # in the corpus
    path: str
    name: str  # the file's name as the user writes it, without secrets
    form: str
    offset: int  # where the block begins: a byte, or a row of Parquet
    size: int  # bytes, or rows
    count: int  # records
    first: int  # index of the block's first record in the corpus
    before: int  # number of records in earlier files
    file: str | None  # the name to show, if there are several files
    stamp: str  # changes with the bytes of the records

    @property
    def begins(self) -> int:
        """The number of the block's first record in the file, from 1."""
        return self.first - self.before + 1

    def __str__(self) -> str:
        return f"{self.name}, records {self.begins} and the {self.count - 1} that follow"


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    path: str
    name: str  # as the user writes it, without secrets
    form: str
    stamp: tuple[int, int]  # size, and time of the last change in ns, which tell whether the file has changed


def opened(path: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URI, by pyarrow or else by fsspec, and the path within it."""
    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(path)
    if path.partition("://")[0] not in _OF_PYARROW:
        system, inside = remote.opened(path)
        return fs.PyFileSystem(fs.FSSpecHandler(system)), inside
    try:
        return fs.FileSystem.from_uri(path)
    except (ValueError, OSError, ImportError) as error:
        raise _failed("use", remote.shown(path), error) from error


def _failed(what: str, name: str, error: Exception) -> InputError:
    """The error for a file or folder that messages call `name`."""
    return InputError(f"Cannot {what} {name}: {remote.without_secrets(first_line(error))}.")


def _uri(path: str, inside: str) -> str:
    """The URI of a file within the file system of `path`, a URI too, whose options it has; or the file's path."""
    if "://" not in path or "://" in inside:
        return inside
    scheme, _, rest = path.partition("://")
    _, mark, options = rest.partition("?")
    return f"{scheme}://{inside}{mark}{options}"


def sources(path: str, form: str | None) -> list[Source]:
    """The files at `path`, a file or a folder, sorted by name; InputError if there are none to read.

    Args:
        form: form of all files; by default each file's name decides.
    """
    system, inside = opened(path)
    shown = remote.shown(path)
    try:
        info = system.get_file_info(inside)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"Cannot read {shown}: there is no such file or folder.")
        is_file = info.type == fs.FileType.File
        infos = [info] if is_file else system.get_file_info(fs.FileSelector(inside))
    except OSError as error:
        raise _failed("read", shown, error) from error
    found = [
        Source(
            _uri(path, info.path),
            shown if is_file else f"{shown.rstrip('/')}/{info.base_name}",
            form or format_of(info.path),
            (info.size, info.mtime_ns or 0),
        )
        for info in sorted(infos, key=lambda one: one.path)
        if info.type == fs.FileType.File and not info.base_name.startswith((".", "_"))
    ]
    if not found:
        raise InputError(f"{shown} has no files.")
    if packed := next((one.path for one in found if one.path.endswith((".gz", ".bz2", ".zst", ".lz4", ".xz"))), None):
        why = "unpack it, since a block of its lines could not be found again"
        raise InputError(f"{remote.shown(packed)} is compressed: {why}.")
    return found


class Cut(NamedTuple):
    """A block within a file: place, size, number of records, stamp."""

    offset: int
    size: int
    records: int
    stamp: str


def cut(source: Source, window: int) -> list[Cut]:
    """Cut a file into blocks, each of `window` records except the last."""
    system, inside = opened(source.path)
    try:
        if source.form == PARQUET:
            with system.open_input_file(inside) as file:
                rows = pyarrow.parquet.ParquetFile(file).metadata.num_rows
            sizes = [(row, min(window, rows - row)) for row in range(0, rows, window)]
            # Changed rows could only be found by reading all of them, so the stamp is that of the file.
            stamp = "-".join(map(str, source.stamp))
            return [Cut(row, size, size, stamp) for row, size in sizes]
        # No decompression, as offsets count bytes of the file.
        with system.open_input_stream(inside, compression=None) as stream:
            return _cut_lines(stream, window, source.name)
    except (OSError, pyarrow.ArrowException) as error:
        raise _failed("read", source.name, error) from error


def _cut_lines(stream: Any, window: int, name: str) -> list[Cut]:
    starts, lines, position, last = [0], 0, 0, b"\n"
    crcs = [0]  # of each block, with a line end after the file's last line
    while chunk := stream.read(_CHUNK):
        if not position:
            check_beginning(chunk[:16], name)
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
        places = (ends[-(lines + 1) % window :: window] + 1).tolist()
        for begin, end in zip([0, *places], [*places, len(chunk)], strict=True):
            if begin:
                crcs.append(0)
            crcs[-1] = zlib.crc32(memoryview(chunk)[begin:end], crcs[-1])
        starts += [place + position for place in places]
        lines, position, last = lines + len(ends), position + len(chunk), chunk[-1:]
    if last != b"\n":
        lines += 1
        crcs[-1] = zlib.crc32(b"\n", crcs[-1])  # so that a missing last line end makes no difference
    starts = [start for start in starts if start < position]  # no block in an empty file, or after the last line
    return [
        Cut(start, end - start, min(window, lines - number * window), f"{crcs[number]:08x}")
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], position], strict=False))
    ]


def numbered(files: list[Source], cuts: list[list[Cut]]) -> list[Block]:
    """All blocks of the corpus, numbered, from the blocks of each file."""
    found: list[Block] = []
    total = 0
    for source, parts in zip(files, cuts, strict=True):
        before, file = total, PurePosixPath(remote.shown(source.path)).name if len(files) > 1 else None
        for one in parts:
            found.append(
                Block(
                    len(found),
                    source.path,
                    source.name,
                    source.form,
                    one.offset,
                    one.size,
                    one.records,
                    total,
                    before,
                    file,
                    one.stamp,
                )
            )
            total += one.records
    return found


def read(block: Block, text_field: str) -> Iterator[Record]:
    """Yield the records of a block; a record that can't be used has its `error` set."""
    system, inside = opened(block.path)
    with system.open_input_file(inside) as file:
        if block.form == PARQUET:
            yield from _rows(block, file, text_field)
            return
        file.seek(block.offset)
        lines = file.read(block.size).split(b"\n")
    if not lines[-1]:
        lines.pop()
    yield from parsed(
        lines,
        block.name,
        block.form,
        text_field=text_field,
        first=block.first,
        before=block.before,
        file=block.file,
    )


def _rows(block: Block, file: Any, text_field: str) -> Iterator[Record]:
    # Read in pieces: a row group may be larger than memory, and rows after the block are not read.
    parquet = pyarrow.parquet.ParquetFile(file, buffer_size=_CHUNK)
    names = parquet.schema_arrow.names
    if text_field not in names:
        raise InputError(f"{block.name} has no column {text_field!r}: --text-field names that of the text.")
    columns = [text_field, *({"id"} & set(names) - {text_field})]
    end = block.offset + block.size
    first, before, groups = 0, 0, []
    for group in range(parquet.num_row_groups):
        after = first + parquet.metadata.row_group(group).num_rows
        if after <= block.offset:
            before = after
        elif first < end:
            groups.append(group)
        first = after
    rows: list[tuple[Any, Any]] = []  # text and id
    for piece in parquet.iter_batches(_ROWS, groups, columns):
        wanted = piece.slice(max(0, block.offset - before), block.size - len(rows))
        before += len(piece)
        texts = wanted.column(text_field).to_pylist()
        rows += zip(texts, wanted.column("id").to_pylist() if "id" in columns else [None] * len(texts), strict=True)
        if before >= end:
            break
    for index, (text, name) in enumerate(rows, block.first):
        record = Record(index, block.name, name=name, before=block.before, file=block.file)
        if isinstance(text, str):
            fill_text(record, text)
        else:
            record.refuse(f"no text in the column {text_field!r}")
        yield record
