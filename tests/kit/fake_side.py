"""A side of a benchmark that answers at once, or fails as a test wants it."""

from __future__ import annotations

from typing import Any

from fastgen.bench.sides import SIDES
from fastgen.bench.tasks import Task

NAMES = ("transformers", "ctranslate2", "fastgen")
TASK = Task("t", "x", "transformer-base", NAMES, batch=1, source=2, new=2)
ANSWER = {"seconds": 1.0, "peak_bytes": 1, "resident_bytes": 2, "tokens": [[5, 6]], "rows": [[2, 5, 6]]}


class Fake:
    """Stands for a side's process; what it does instead of answering is by side and question."""

    troubles: dict[tuple[str, str], Exception]

    def __init__(self, order: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = next(name for name in NAMES if SIDES[name].environment == environment)
        if order["runner"] in ("ctranslate2", "convert"):
            self.name = order["runner"]
        self.versions = {"torch": "1"}
        self.cpu_seconds, self.turns = 0.0, 0

    def _ask(self, what: str) -> None:
        if (trouble := self.troubles.get((self.name, what))) is not None:
            raise trouble

    def load(self) -> dict[str, str]:
        self._ask("load")
        return self.versions

    def first(self) -> dict[str, Any]:
        self._ask("first")
        return dict(ANSWER)

    def turn(self, calls: int = 1) -> float:
        self._ask(f"turn {self.turns}")
        self.turns += 1
        return 0.5

    def phases(self) -> dict[str, float]:
        self._ask("phases")
        return {"encoder": 1.0, "total": 1.0}

    def counts(self) -> dict[str, int]:
        self._ask("counts")
        return {"operators": 7}

    def close(self) -> None:
        pass
