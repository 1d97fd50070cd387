"""Chooses the tier of a call, raises in strict mode, and records the call; used for every host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from fastgen import config, report

FAST, COMPAT, STOCK = report.TIERS
_CONFIGURED = "tier='stock' is configured"


class Decision(NamedTuple):
    """The tier that a call runs in, with the reason."""

    tier: str
    reason: str | None  # why in no better tier


def decide(
    unsupported: Callable[[], str | None],
    not_fast: Callable[[], str | None] | None = None,
    wants_fast: bool = True,
) -> Decision:
    """Choose the tier of a call, by the user's settings.

    Args:
        unsupported: why the call is left to the host, or None; called only if the settings allow another tier.
        not_fast: why our own loop cannot run it, or None; if absent, the host has no such loop.
        wants_fast: whether our own loop is preferred to the host's where no tier is configured.

    Raises:
        FallbackError: in strict mode, where the stock code would take over, or with tier="fast" the host's loop.
    """
    settings = config.current()
    if settings.tier == STOCK:
        return Decision(STOCK, _CONFIGURED)
    if (reason := unsupported()) is not None:
        if settings.strict:
            raise report.FallbackError(str(reason))
        return Decision(STOCK, reason)
    if not_fast is None or not (wants_fast or settings.tier == FAST):
        return Decision(COMPAT, None)
    if (reason := not_fast()) is not None and settings.strict and settings.tier == FAST:
        raise report.FallbackError(str(reason))
    if reason is not None or settings.tier == COMPAT:
        return Decision(COMPAT, reason)
    return Decision(FAST, None)


class Record:
    """The record of one call; the call's time begins when the record is made."""

    def __init__(self, host: str, model: str, batch: int, beams: int) -> None:
        self._call = (host, model)
        self._size = (batch, beams)
        self._start = time.perf_counter()

    def done(
        self,
        decision: Decision,
        steps: int | None = None,
        cache_bytes: int | None = None,
        cache: str | None = None,
        plan: str | None = None,
    ) -> None:
        """Record that the call has ended in the tier decided; see `fastgen.Call` for the other fields."""
        seconds = time.perf_counter() - self._start
        report.record(report.Call(*self._call, *decision, *self._size, steps, seconds, cache_bytes, cache, plan))
