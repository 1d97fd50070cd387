"""The journal beside a results file: how much of it is complete, and what the rest of the run needs to know.

A batch's lines go to the results file first, then one line goes to the journal. So after a kill at any point the file
is cut back to the journal's last whole line, and the run goes on from there. The journal is removed when the run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

    def start(self) -> None:
        """A new run."""
        with writing(self.path):
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115
            self._append({"settings": self._settings})

    def resume(self) -> list[dict[str, Any]]:
        """The records of an earlier run with the same settings; the results file is cut back to them."""
        size = self.results.stat().st_size
        records: list[dict[str, Any]] = []
        kept = 0
        for line in self.path.read_bytes().split(b"\n")[:-1]:  # the last one is cut off, or empty
            try:
                record = json.loads(line)
            except ValueError:  # a crash of the whole machine can leave anything at the end
                break
            if records and record["bytes"] > size:
                break
            records.append(record)
            kept += len(line) + 1
        if not records or "settings" not in records[0]:
            raise InputError(f"Cannot resume: {self.path} is not a journal; start without --resume.")
        if different := _differences(records[0]["settings"], self._settings):
            raise InputError(f"Cannot resume {self.results}: it was begun with another {different}.")
        with writing(self.path):
            os.truncate(self.results, records[-1]["bytes"] if len(records) > 1 else 0)
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

    def close(self, *, finished: bool) -> None:
        """Remove the journal of a run that finished; keep it for `resume` otherwise."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError:  # a full disk again: what is on it stands
                if finished:
                    raise
        if finished:
            self.path.unlink(missing_ok=True)


def journal_path(results: Path) -> Path:
    return results.with_name(results.name + ".journal")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(sorted(names))
