"""Which phase each call of a built-in function belongs to: what samples would say, without time."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import fastgen
from fastgen.bench import phase_rules


@contextlib.contextmanager
def running(side: str) -> Iterator[None]:
    fastgen.configure(replay="off", tier="auto" if side == "stock" else side)
    with fastgen.disabled() if side == "stock" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def asked_at_every_call(table: phase_rules.Table) -> Iterator[dict[str, collections.Counter[str]]]:
    """By built-in function, the phases in which it is called."""
    phases: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def ask(frame: Any, event: str, called: Any) -> None:
        if event == "c_call":
            phases[getattr(called, "__name__", "")][table.phase(frame, end)] += 1

    end = sys._getframe(2)
    sys.setprofile(ask)
    try:
        yield phases
    finally:
        sys.setprofile(None)
