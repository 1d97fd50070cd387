"""A side's process as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from fastgen.bench.runners import Refused

# Settings of the user's own would reach some sides and not others.
_DROPPED = ("FASTGEN_", "OMP_", "MKL_", "CT2_")
_KEPT = ("FASTGEN_NATIVE", "FASTGEN_CACHE_DIR")  # whether and where operators are compiled


class Child:
    """`order` is what `fastgen.bench.worker` reads first. Refused is raised where the side can't do it."""

    def __init__(self, order: dict[str, Any], environment: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_DROPPED)}
        threads = str(order["threads"])
        chosen = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **environment}
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastgen.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            env=kept | chosen,
        )
        self.cpu_seconds = 0.0  # of all turns so far
        self.versions: dict[str, str] = {}  # of what it runs
        self._send(order)

    def load(self) -> None:
        """Wait until the model is loaded: to be called before all else."""
        self.versions = self._answer()["versions"]

    def first(self) -> dict[str, Any]:
        return self._ask({"do": "first"})

    def turn(self, calls: int = 1) -> float:
        """Mean seconds of a call."""
        answer = self._ask({"do": "turn", "calls": calls})
        self.cpu_seconds += answer["cpu_seconds"]
        return float(answer["seconds"])

    def phases(self) -> dict[str, float]:
        found: dict[str, float] = self._ask({"do": "phases"})["phases"]
        return found

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = self._ask({"do": "counts"})["counts"]
        return found

    def close(self) -> None:
        """The end of its input ends it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._said.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._send(question)
        return self._answer()

    def _send(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` says that it died
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise Refused(f"its process died with exit status {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if why := answer.get("refused") or answer.get("error"):
            raise Refused(why)
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
