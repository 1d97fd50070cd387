"""What the benchmarks of both hosts share: the two sides, ratios of rounds, and how quiet the machine was."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import fastgen

SIDES = ("stock", "fastgen")


def running(side: str) -> contextlib.AbstractContextManager[Any]:
    return fastgen.disabled() if side == "stock" else contextlib.nullcontext()


class OtherProcesses:
    """How many cores all other processes kept busy since this was made; None where /proc/stat is missing."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """Seconds of CPU time taken by other processes so far, and the time of day."""
        try:
            counts = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        user, nice, system = (int(count) / os.sysconf("SC_CLK_TCK") for count in counts[1:4])
        return user + nice + system - time.process_time(), time.perf_counter()

    def cores(self, besides: float = 0.0) -> float | None:
        """`besides`: CPU seconds meanwhile of a child, which is no other process."""
        before, now = self._before, self._now()
        if before is None or now is None:
            return None
        return round(max(0.0, (now[0] - before[0] - besides) / (now[1] - before[1])), 2)


def ratios(rounds: list[dict[str, float]], sides: tuple[str, str] = SIDES) -> dict[str, float]:
    """Median, least and largest of the rounds' stock / fastgen (or other sides), and each side's median seconds."""
    each = [one[sides[0]] / one[sides[1]] for one in rounds]
    return {
        "ratio": statistics.median(each),
        "min": min(each),
        "max": max(each),
        **{side: statistics.median(one[side] for one in rounds) for side in sides},
    }


def busiest(results: list[dict[str, Any]]) -> float:
    """The most cores that other processes kept busy while one side was timed."""
    rounds = [one["other_processes"].values() for result in results for one in result["rounds"]]
    return max((cores or 0.0 for one in rounds for cores in one), default=0.0)


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
