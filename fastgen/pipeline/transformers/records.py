"""Reads and writes records of fastgen-generate-transformers: text, one a line, JSONL, or (with Ray) Parquet."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import InputError, writable
from fastgen.pipeline.growing_line import in_one_line

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
_COMPRESSED = re.compile(rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\x28\xb5\x2f\xfd|\xfd7zXZ\x00|\x04\x22\x4d\x18|PK\x03\x04")


@dataclass
class Record:
    """One line of the input, with the error if it can't be used."""

    index: int
    path: str
    text: str = ""
    name: Any = None  # "id" of a JSONL record
    before: int = 0  # number of records in earlier files
    file: str | None = None  # to be named in JSONL output, if the input is several files
    error: str | None = None
    blank: bool = False  # nothing to generate from, and no error: an ordinary line of a text
    tokens: list[int] = field(default_factory=list)
    crc: int = 0  # CRC of the line

    @property
    def line(self) -> int:
        return self.index - self.before + 1

    @property
    def usable(self) -> bool:
        """Whether there is something to generate from."""
        return self.error is None and not self.blank

    def refuse(self, why: str) -> None:
        """Mark the record as failed, with a sentence that names file and line."""
        self.error = writable(f"{self.path}, line {self.line}: {why}.")


def format_of(path: str | Path) -> str:
    suffix = Path(path).suffix.lower()
    return JSONL if suffix in (".jsonl", ".ndjson") else PARQUET if suffix in (".parquet", ".pq") else TEXT


def count_lines(path: Path, name: str = "") -> int:
    """The number of records in a file, which messages call `name` if that is given; InputError if there is none, or if
    it is no text in UTF-8 by its beginning."""
    name = name or str(path)
    lines, last = 0, b"\n"
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                if not lines and last == b"\n":
                    check_beginning(block, name)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise InputError(f"Cannot read {name}: {error.strerror or error}.") from None
    lines += last != b"\n"
    if not lines:
        raise InputError(f"{name} is empty: it should hold one record a line.")
    return lines


def check_beginning(data: bytes, name: str) -> None:
    """Raise InputError if a file begins as one that is compressed, or UTF-16: some of its lines would pass for text."""
    if _COMPRESSED.match(data):
        raise InputError(f"{name} is compressed: unpack it first.")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{name} is UTF-16, not UTF-8 text: convert it first (iconv -f UTF-16 -t UTF-8).")


def read_lines(path: Path) -> list[str]:
    """The lines of a file, as `parsed` takes them: they end at line feeds alone, and there is no byte order mark.

    Raises:
        InputError: the file can't be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None
    check_beginning(data, str(path))
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(line.rstrip(b"\r").decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError(f"{path}, line {number}: not UTF-8.") from None
    return found


def read(path: Path, form: str, *, text_field: str = "text", name: str = "") -> Iterator[Record]:
    """Yield the records of a file; for a line that can't be used `error` is a sentence with file and line.

    Args:
        name: what such sentences call the file; its path by default.
    """
    with open(path, "rb") as file:
        yield from parsed(file, name or str(path), form, text_field=text_field)


def line_crc(line: bytes) -> int:
    """The CRC of a line, without the line end, which the last line may lack."""
    return zlib.crc32(line.rstrip(b"\r\n"))


def chained(crc: int, line_crc: int) -> int:
    """The CRC of some lines and one more, from the CRC of the lines (0 if there are none) and the line's CRC."""
    return zlib.crc32(line_crc.to_bytes(4, "little"), crc)


def lines_crc(lines: Iterable[bytes]) -> int:
    """The CRC of all these lines, chained."""
    crc = 0
    for line in lines:
        crc = chained(crc, line_crc(line))
    return crc


def parsed(
    lines: Iterable[bytes],
    path: str,
    form: str,
    *,
    text_field: str,
    first: int = 0,
    before: int = 0,
    file: str | None = None,
) -> Iterator[Record]:
    """Yield the records of these lines, with indices from `first` on; `before` and `file`: see Record."""
    for index, raw in enumerate(lines, first):
        record = Record(index, path, before=before, file=file, crc=line_crc(raw))
        if record.line == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            line = raw.rstrip(b"\r\n").decode("utf-8")
        except UnicodeDecodeError as error:
            record.refuse(f"not UTF-8 (byte {raw[error.start]:#04x} at position {error.start + 1})")
        else:
            _fill(record, line, form, text_field)
        yield record


def _fill(record: Record, line: str, form: str, text_field: str) -> None:
    if not line.strip():
        record.blank = True
        return
    if form == TEXT:
        record.text = line
        return
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        record.refuse(f"not JSON ({error.msg} at position {error.pos + 1})")
        return
    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
        record.refuse(f"JSON that cannot be read ({error})")
        return
    text, record.name = (fields.get(text_field), fields.get("id")) if isinstance(fields, dict) else (None, None)
    if isinstance(text, str):
        fill_text(record, text)
    else:
        record.refuse(f"not an object with the text in its field {text_field!r}")
    if why := _unwritable(record.name):  # of a failed record, too, as its name is written
        record.name = None
        record.refuse(why)


def fill_text(record: Record, text: str) -> None:
    """Set the text of a record; it is refused if it could not be written back."""
    record.text = text
    record.blank = not text.strip()
    if why := _unwritable(text):
        record.refuse(why)


def _unwritable(value: Any) -> str:
    """Why a value can't be written back as JSON in UTF-8, though Python could read it; "" if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    except (ValueError, RecursionError):
        return "the field 'id' has what JSON can't say: NaN, an infinite number, or too deep a nesting"
    return ""


def render(record: Record, outputs: list[tuple[str, float | None]], form: str) -> str:
    """The output lines of a record, with line ends; for a failed one the error in JSONL, and `outputs` in text."""
    if form == TEXT:
        return "".join(in_one_line(text) + "\n" for text, _ in outputs)
    fields: dict[str, Any] = (
        {"line": record.line} if record.file is None else {"file": record.file, "line": record.line}
    )
    if record.name is not None:
        fields["id"] = record.name
    if record.error is not None:
        fields["error"] = record.error
    else:
        fields["outputs"] = [
            {"text": text} if score is None else {"text": text, "score": score} for text, score in outputs
        ]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def best_outputs(path: Path, form: str, per_record: int) -> Iterator[str | None]:
    """The first hypothesis of each record of a finished output; None for error records."""
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file):
            if form == TEXT:
                if number % per_record == 0:
                    yield line.rstrip("\n")
            else:
                fields = json.loads(line)
                yield None if "error" in fields else fields["outputs"][0]["text"]
