"""Where the time of a generation goes, by phase: a sampling profiler that changes nothing in what it measures."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

from fastgen import config
from fastgen.bench.document import PHASES
from fastgen.bench.phase_rules import OTHER, Table

INTERVAL = 0.001  # seconds between two samples
_SWITCH_INTERVAL = 1e-4  # seconds that Python's lock may be waited for, of the default's 5e-3


class Phases:
    """`with Phases(model) as phases:` around warm calls of a host's generation, accelerated or not.

    A thread of its own looks at the stack of the thread that has entered the block, about every millisecond, and adds
    the time since its last look to one phase (`fastgen.bench.phase_rules`). Nothing is hooked or replaced, which
    fastgen would see and avoid, and which would weigh most on what is shortest. A share p of n independent samples has
    the standard error sqrt(p (1 - p) / n): 0.5 percentage points at most of 10 seconds'. Measure several calls if one
    is short.

    What it cannot tell apart: of steps that fastgen has recorded and replays, which operator runs. So inside the block
    they are not replayed (`replay="off"`): at one sentence or few its real time is a little less. And on a GPU what is
    under way is not what was called: there the process is to run with CUDA_LAUNCH_BLOCKING=1, which costs time of its
    own, on all sides. Compiled steps (`compile=True`) are the rest of the decoder as a whole.
    """

    def __init__(self, model: Any, host: str = "transformers", interval: float = INTERVAL) -> None:
        """`model`: the host's, or a list of an ensemble's; `host`: "transformers" or "fairseq"; `interval`: seconds."""
        if host not in ("transformers", "fairseq"):
            raise ValueError(f"host must be transformers or fairseq, not {host!r}")
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        encoders = [encoder for each in models if (encoder := _encoder_of(each)) is not None]
        self._table = Table(set(map(type, models)) if host == "transformers" else (), encoders)
        self._interval = interval
        self.seconds: dict[str, float] = {}  # by phase, those that took any, and "total": of the wall
        self.samples = 0

    def __enter__(self) -> Phases:
        self._taken = dict.fromkeys(PHASES, 0.0)
        self.seconds, self.samples = {}, 0
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(config.configured(replay="off"))
        self._stack.enter_context(_switching(_SWITCH_INTERVAL))
        started, self._is_over = threading.Event(), False
        caller = sys._getframe(1)
        arguments = threading.get_ident(), caller, started
        self._thread = threading.Thread(target=self._watch, args=arguments, name="fastgen-phases", daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total = time.perf_counter() - self._start
        self._is_over = True
        self._thread.join()
        self._stack.close()
        # From the start until the first sample and from the last one on it is not known.
        self._taken[OTHER] += max(0.0, total - sum(self._taken.values()))
        self.seconds = {name: taken for name, taken in self._taken.items() if taken > 0} | {"total": total}

    def _watch(self, thread: int, end: FrameType | None, started: threading.Event) -> None:
        jitter = random.Random(0).uniform  # or the samples might keep step with the decoder's
        taken, phase_of = self._taken, self._table.phase
        last = self._start = time.perf_counter()
        started.set()
        while True:
            time.sleep(self._interval * jitter(0.5, 1.5))  # cheaper than to wait for an event
            frame, now = sys._current_frames().get(thread), time.perf_counter()
            if self._is_over:
                return
            phase = phase_of(frame, end)
            del frame
            taken[phase] += now - last
            self.samples += 1
            last = now


def _encoder_of(model: Any) -> Any:
    """The module, or None if the model has none."""
    if hasattr(model, "get_encoder"):
        return model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else None
    return getattr(model, "encoder", None)


@contextlib.contextmanager
def _switching(interval: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def shares(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of `Phases.seconds.items()`, each phase's part of the total."""
    each = dict(seconds)
    total = each.pop("total", 0.0)
    return {name: taken / total for name, taken in each.items()} if total else {}
