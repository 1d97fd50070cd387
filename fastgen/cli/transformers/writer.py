"""The output file, in the order of the input."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from fastgen.cli.transformers import records
from fastgen.pipeline.errors import writing
from fastgen.pipeline.resume import Journal

_SHOWN_ERRORS = 10


class Writer:
    """Puts results back into the order of the input; runs in the writing thread.

    What can't be written yet, because an earlier record is still to come, is kept in the journal.
    """

    def __init__(self, path: Path, form: str, journal: Journal, earlier: list[dict[str, Any]]) -> None:
        self._path, self._form, self._journal = path, form, journal
        self.next = int(earlier[-1]["next"]) if earlier else 0
        held = {int(index): text for record in earlier for index, text in record["held"]}
        self._held = {index: text for index, text in held.items() if index >= self.next}
        self.errors_shown = 0
        with writing(self._path):
            self._file = open(self._path, "a" if earlier else "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    @property
    def finished(self) -> set[int]:
        return {*range(self.next), *self._held}

    def write(self, texts: list[str], note: tuple[list[records.Record], list[float | None], int]) -> None:
        """`texts` of a batch, `per_record` for each record without an error."""
        batch, scores, per_record = note
        pairs = iter(zip(texts, scores, strict=True))
        new: list[tuple[int, str]] = []
        for record in batch:
            outputs = [] if record.error else [next(pairs) for _ in range(per_record)]
            if record.index < self.next or record.index in self._held:
                continue  # of an earlier run
            self._show(record)
            new.append((record.index, records.render(record, outputs, self._form)))
        self._held.update(new)
        ready: list[str] = []
        while (text := self._held.pop(self.next, None)) is not None:
            ready.append(text)
            self.next += 1
        with writing(self._path):
            self._file.write("".join(ready))
            self._file.flush()
            size = os.fstat(self._file.fileno()).st_size
        self._journal.batch(size, next=self.next, held=[entry for entry in new if entry[0] >= self.next])

    def _show(self, record: records.Record) -> None:
        if record.error is not None and self.errors_shown <= _SHOWN_ERRORS:
            more = self.errors_shown == _SHOWN_ERRORS
            print(
                f"fastgen-generate-transformers: {'more errors are in the output' if more else record.error}",
                file=sys.stderr,
            )
            self.errors_shown += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # on a full disk closing fails as well
                self._file.close()
            return
        with writing(self._path):
            self._file.close()
