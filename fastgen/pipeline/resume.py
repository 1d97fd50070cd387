"""The journal beside a results file: how much of it is complete, and what the rest of the run needs to know.

A batch's lines go to the results file first, then one line goes to the journal. So after a kill at any point the file
is cut back to the journal's last whole line, and the run goes on from there. The journal is removed when the run ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from fastgen.pipeline.errors import InputError, writing


class Journal:
    """Appends to ``<results>.journal``: a header with the run's settings, then a line for every batch."""

    def __init__(self, results: Path, settings: Mapping[str, Any]) -> None:
        self.results = results
        self.path = journal_path(results)
        self._settings = json.loads(json.dumps(settings, default=str))
        self._file: TextIO | None = None

    @contextlib.contextmanager
    def begin(self, *, resume: bool = False) -> Iterator[list[dict[str, Any]]]:
        """The records of an earlier run, if there was one to resume; to be entered before the results are opened.

        With `resume`, the results file is cut back to what the records say. At the end the journal is removed, unless
        an exception ended the run.
        """
        records = self._resume() if resume and self.results.exists() and self.path.exists() else []
        if not records:
            with writing(self.path):
                self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115
                self._append({"settings": self._settings})
        assert self._file is not None
        try:
            yield records
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk again: what is on it stands
                self._file.close()
            raise
        with writing(self.path):
            self._file.close()
            self.path.unlink()

    def _resume(self) -> list[dict[str, Any]]:
        size = self.results.stat().st_size
        records: list[dict[str, Any]] = []
        kept = 0
        lines = self.path.read_bytes().split(b"\n")[:-1]  # the last one is cut off, or empty
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # a crash of the whole machine can leave anything at the end
                break
            if records and record["bytes"] > size:
                break
            records.append(record)
            kept += len(line) + 1
        if not lines:  # killed before there was anything to note
            return []
        if not records or "settings" not in records[0]:
            raise InputError(f"Cannot resume: {self.path} is not a journal; start without --resume.")
        if different := _differences(records[0]["settings"], self._settings):
            raise InputError(f"Cannot resume {self.results}: it was begun with another {different}.")
        if len(records) == 1:
            return []
        with writing(self.path):
            os.truncate(self.results, records[-1]["bytes"])
            os.truncate(self.path, kept)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        return records[1:]

    def batch(self, results_bytes: int, **facts: Any) -> None:
        """The results file is complete up to `results_bytes`."""
        with writing(self.path):
            self._append({"bytes": results_bytes, **facts})

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()


def journal_path(results: Path) -> Path:
    return results.with_name(results.name + ".journal")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(sorted(names))
