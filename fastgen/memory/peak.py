"""Measures the peak memory of a piece of work, less the memory that was held before it."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

from fastgen.memory.release import release

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """``with PeakMemory(device) as memory: work()``, then ``memory.bytes``; None where it can't be measured.

    CUDA: torch's own count. Linux: the process's resident memory, whose high-water mark is reset first, after
    memory that is free already went back to the system. So everything counts, native buffers included.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> PeakMemory:
        release()  # kept memory would be used again, and not count
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            _return_free_memory()
            self._before = field("VmRSS") if reset_high_water_mark() else None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._before is None:
            return
        if self.device.type == "cuda":
            import torch

            peak: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = field("VmHWM")
        self.bytes = None if peak is None else max(0, peak - self._before)

    @staticmethod
    def meaning(device: Any, call: str, part: str) -> str:
        """What the number means, in words for the user; `call`: what ran meanwhile, and on which `part` of the work."""
        what = f"in {call} above what the process held before it ({part})"
        if device.type == "cuda":
            return f"GPU memory allocated by torch, peak {what}."
        if field("VmHWM") is None:
            return "Peak memory is not measured on this system: it takes Linux's /proc."
        return f"Resident memory of the process, peak {what}."


def field(name: str) -> int | None:
    """The value of one line of /proc/self/status, in bytes."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_high_water_mark() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _return_free_memory() -> None:
    """Return freed memory to the system: glibc keeps it, and work that reuses it would seem to need less."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
