"""A side's process as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

from fastgen.bench.runners import Missing, Refused

# Settings of the user's own would reach some sides and not others.
_DROPPED = ("FASTGEN_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "CT2_")
_KEPT = ("FASTGEN_NATIVE", "FASTGEN_CACHE_DIR")  # whether and where operators are compiled

_TO_END, _TO_ANSWER = 5, 3600  # seconds until it is killed


class Changed(Exception):
    """Outputs, by their numbers, that are not those of a side's first call."""

    def __init__(self, outputs: list[int]) -> None:
        super().__init__(f"{len(outputs)} outputs are not those of its first call")
        self.outputs = outputs


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
        self.versions: dict[str, str] = {}
        self._send(order)

    def load(self) -> dict[str, str]:
        """Wait until the model is loaded, before all else is asked; returns the versions of what it runs."""
        self.versions = self._answer()["versions"]
        return self.versions

    def first(self) -> dict[str, Any]:
        return self._ask({"do": "first"})

    def turn(self, calls: int = 1) -> float:
        """Mean seconds of a call. Changed is raised where outputs are not those of the first call."""
        answer = self._ask({"do": "turn", "calls": calls})
        self.cpu_seconds += answer["cpu_seconds"]
        if answer["changed"]:
            raise Changed(answer["changed"])
        return float(answer["seconds"])

    def phases(self) -> dict[str, float]:
        found: dict[str, float] = self._ask({"do": "phases"})["phases"]
        return found

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = self._ask({"do": "counts"})["counts"]
        return found

    def near_ties(self, number: int) -> list[dict[str, Any]]:
        """What it answers to one input, as it is and with weights moved by rounding; it can do nothing else then."""
        found: list[dict[str, Any]] = self._ask({"do": "near_ties", "number": number})["answers"]
        return found

    def close(self) -> None:
        """The end of its input ends it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_TO_END)
            except subprocess.TimeoutExpired:  # in the middle of something, or stopped
                self._process.kill()
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
        limit = threading.Timer(_TO_ANSWER, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise Refused(f"its process died with exit status {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if why := answer.get("refused") or answer.get("error"):
            raise Missing(why) if answer.get("missing") else Refused(why)
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
