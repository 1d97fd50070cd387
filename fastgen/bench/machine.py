"""Where it is measured, and how quiet it is there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any


def describe(device: str, threads: int) -> dict[str, Any]:
    """Processor, cores that this process may use, threads of a side, memory, system, and the GPU if there is one."""
    found: dict[str, Any] = {"cpu": cpu(), "cores": cores(), "threads": threads, "system": platform.system()}
    found["device"] = device
    if sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):
            found["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device != "cpu":
        import torch

        found["device"] = torch.cuda.get_device_name()
    return found


def cpu(description: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; with its family and model where the name has no number, as on many virtual machines."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in description.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    found = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields and not re.search(r"\d", found):
        found += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return found


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds() -> float:
    """CPU time so far of this process and, where there is /proc, of the worker processes that it has."""
    times = os.times()
    used = time.process_time() + times.children_user + times.children_system  # the latter of those that have ended
    if sys.platform == "win32":
        return used
    for process in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            user, system = fields[11:13]  # utime and stime of proc(5), which counts the two fields before
            used += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return used


class OtherProcesses:
    """How many cores all other processes kept busy since this was made; None where /proc/stat is missing."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """Seconds of CPU time taken by other processes so far, and the time of day."""
        if sys.platform == "win32":
            return None
        try:
            counts = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        user, nice, system = (int(count) / os.sysconf("SC_CLK_TCK") for count in counts[1:4])
        return user + nice + system - time.process_time(), time.perf_counter()

    def cores(self, besides: float = 0.0) -> float | None:
        """`besides`: CPU seconds meanwhile of a child that is measured."""
        before, now = self._before, self._now()
        if before is None or now is None or now[1] <= before[1]:
            return None
        return round(max(0.0, (now[0] - before[0] - besides) / (now[1] - before[1])), 2)
