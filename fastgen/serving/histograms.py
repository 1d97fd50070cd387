"""A histogram in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts values by size; any thread may observe and write."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        """`bounds`: of the buckets, ascending; a value belongs to the first bound that it does not exceed."""
        self.name, self._about, self._bounds = name, about, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def lines(self, labels: str) -> Iterator[str]:
        """The lines of the text format, with these labels on each."""
        with self._lock:
            below, total = list(accumulate(self._counts)), self._sum
        yield f"# HELP {self.name} {self._about}"
        yield f"# TYPE {self.name} histogram"
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], below, strict=True):
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {count}'
        yield f"{self.name}_sum{{{labels}}} {total}"
        yield f"{self.name}_count{{{labels}}} {below[-1]}"
