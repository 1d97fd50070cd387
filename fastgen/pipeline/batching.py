"""Finds the largest batch size that pays, by doubling, and backs off when memory runs out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastgen.memory.limits import is_out_of_memory

Unit = TypeVar("Unit")
Result = TypeVar("Result")

# A doubling that leaves less than this part of the speed is taken back. Only on the CPU, where memory hardly ever runs
# out, but caches do; a GPU gets faster until its memory is full.
_WORTH_KEEPING = 0.95


def release_memory() -> None:
    """Free cached blocks of memory, so that a smaller batch finds room."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_with_backoff(
    units: Sequence[Unit],
    run: Callable[[Sequence[Unit]], list[Result]],
    out_of_memory: Callable[[Sequence[Unit]], None] | None = None,
) -> list[Result]:
    """Return `run(units)`, one result for each unit; if memory runs out, run each half, down to single units.

    `out_of_memory` is called with every batch that failed. If a single unit doesn't fit, the error is raised.
    """
    try:
        return run(units)
    except (MemoryError, RuntimeError) as error:
        if len(units) < 2 or not is_out_of_memory(error):
            raise
    # After the `except` block, as the traceback holds the tensors of the failed batch.
    release_memory()
    if out_of_memory is not None:
        out_of_memory(units)
    middle = len(units) // 2
    return run_with_backoff(units[:middle], run, out_of_memory) + run_with_backoff(units[middle:], run, out_of_memory)


class AutoBatch:
    """The size of the next batch, in whatever unit the caller counts (sentences or padded tokens).

    It doubles after each full batch until one runs out of memory, is predicted to (see `fits`), or, with `by_speed`,
    is slower than earlier batches; after that it only shrinks.
    """

    def __init__(self, start: int, *, by_speed: bool = False, fits: Callable[[], bool] = lambda: True) -> None:
        if start < 1:
            raise ValueError(f"start must be at least 1, not {start}.")
        self.size = start
        self._by_speed = by_speed
        self._fits = fits
        self._growing = True
        self._best_speed = 0.0

    @property
    def settled(self) -> bool:
        """Whether the size will not grow any more."""
        return not self._growing

    @classmethod
    def on_device(cls, kind: str, start: int) -> AutoBatch:
        """An `AutoBatch` with the settings for a device of torch's type `kind`."""
        return cls(start, by_speed=kind == "cpu", fits=lambda: _double_fits(kind))

    def succeeded(self, used: int, speed: float) -> None:
        """Note that a batch of `used` units ran, at `speed` (anything per second)."""
        if not self._growing or 2 * used <= self.size:  # a batch that was not full says nothing
            return
        if self._by_speed and speed < _WORTH_KEEPING * self._best_speed:
            self.size = max(1, self.size // 2)
            self._growing = False
            return
        self._best_speed = max(speed, self._best_speed)
        if self._fits():
            self.size *= 2
        else:
            self._growing = False

    def failed(self, used: int) -> None:
        """Note that a batch of `used` units ran out of memory."""
        self.size = max(1, min(self.size, used) // 2)
        self._growing = False


def _double_fits(device_type: str) -> bool:
    """Whether a batch twice as large should fit, judged by the peak so far; True if the peak isn't known."""
    torch = sys.modules.get("torch")
    if torch is None or device_type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info()
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return 2 * peak < free + kept
