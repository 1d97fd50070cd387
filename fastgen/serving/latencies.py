"""Times how long inputs wait, how soon the first token comes, and how fast the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fastgen.serving.generation_request import GenerationRequest
from fastgen.serving.histograms import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_SECONDS_OF_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_Unit = tuple[GenerationRequest, int]  # an input of a request


class Request(Protocol):
    """A request, of whichever kind."""

    since: float  # of time.monotonic(): when it came
    is_over: bool

    @property
    def listener(self) -> Callable[[Any], None]: ...


class Latencies:
    """Histograms of an engine, in seconds, one value for each input. Any thread may observe."""

    def __init__(self, before_first: int) -> None:
        """`before_first`: tokens of a result that come before the first chosen one, such as a decoder's start."""
        self._before_first = before_first
        self._queue = Histogram("fastgen_queue_seconds", "Time from a request to the start of an input", _SECONDS)
        self._first = Histogram(
            "fastgen_time_to_first_token_seconds", "Time from a request to the first token of an input", _SECONDS
        )
        self._others = Histogram(
            "fastgen_time_per_output_token_seconds",
            "Time from the first token of an input to its end, for each token of its longest output but the first",
            _SECONDS_OF_A_TOKEN,
        )
        self.histograms = (self._queue, self._first, self._others)

    def left_queue(self, units: Iterable[tuple[Request, int]]) -> None:
        """These inputs begin now."""
        now = time.monotonic()
        for request, _ in units:
            self._queue.observe(now - request.since)

    def first_tokens(self, units: Iterable[_Unit]) -> None:
        """The first token of each of these inputs has been chosen."""
        now = time.monotonic()
        for request, index in units:
            request.first_tokens[index] = now
            self._first.observe(now - request.since)

    def finished(self, request: GenerationRequest, index: int, tokens: int) -> None:
        """This input has its result; one that the host's own `generate` decoded has no time of a first token.

        Args:
            tokens: of its longest output, those before the first chosen one among them.
        """
        began = request.first_tokens.get(index)
        others = tokens - self._before_first - 1
        if began is not None and others > 0:
            self._others.observe((time.monotonic() - began) / others)
