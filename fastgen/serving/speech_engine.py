"""Writes down speech in one thread: recordings come and go, and their windows share the steps of the decoder.

Each recording is a call of the host's own pipeline, as `fastgen.transcribe` makes it; the next one begins when there is
room, while others are at work.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastgen.optimizer import together
from fastgen.pipeline.transcription.pipelines import sharing_steps
from fastgen.serving import failures
from fastgen.serving.counts import Counts
from fastgen.serving.engine import EXPIRED, STOPPED
from fastgen.serving.generation_request import Failed, Full, Stopped
from fastgen.serving.latencies import Latencies


@dataclass(eq=False)
class SpeechRequest:
    """A recording that is to be written down."""

    work: Callable[[], Any]  # calls the pipeline; what it returns goes to the listener
    listener: Callable[[Any], None]  # called once, in the engine's thread, with that or with Failed; must not wait
    deadline: float = float("inf")  # of time.monotonic()
    since: float = field(default_factory=time.monotonic)
    is_over: bool = False


class _Unwanted(Exception):
    """Ends the work on a recording for which nobody waits any more."""


_current: contextvars.ContextVar[SpeechRequest | None] = contextvars.ContextVar("fastgen_speech", default=None)


def _check() -> None:
    """Raise _Unwanted within the work on a recording that is cancelled or late."""
    request = _current.get()
    if request is not None and (request.is_over or request.deadline < time.monotonic()):
        raise _Unwanted


class SpeechEngine:
    """Works on recordings from any thread, in a thread of its own."""

    def __init__(self, pipeline: Any, *, most_together: int, most_queued: int) -> None:
        """Start the engine, which `close` ends.

        Args:
            pipeline: for speech recognition, of transformers.
            most_together: the most recordings whose windows decode together.
            most_queued: the most recordings that may wait.
        """
        self.counts, self.latencies = Counts(), Latencies(0)
        self._pipeline, self._most_together, self._most_queued = pipeline, most_together, most_queued
        self._attention = pipeline.model.config._attn_implementation
        self._waiting: deque[SpeechRequest] = deque()
        self._begun: dict[int, SpeechRequest] = {}  # by number of the call
        self._changed = threading.Condition()
        self._is_closed = self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="fastgen-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: SpeechRequest) -> None:
        """Queue a request. Raises Full or, if the engine has ended, Stopped."""
        with self._changed:
            if self._is_closed or not self._thread.is_alive():
                raise Stopped
            if len(self._waiting) >= self._most_queued:
                self.counts.refused += 1
                raise Full
            self.counts.requests += 1
            self.counts.inputs += 1
            self._waiting.append(request)
            self.counts.queued = len(self._waiting)
            self._changed.notify()

    def cancel(self, request: SpeechRequest) -> None:
        """Cancel a request for which nobody waits, from any thread; work on it ends before the next window."""
        with self._changed:
            if not request.is_over:
                request.is_over = True
                self.counts.cancelled += 1

    def close(self) -> None:
        """End the thread; unfinished requests fail."""
        with self._changed:
            self._is_closed = True
            for request in list(self._begun.values()):  # which end before the next window
                self._end(request, Failed(503, STOPPED))
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed or self._is_lost)
                if self._is_closed or self._is_lost:
                    break
            try:
                with sharing_steps(self._pipeline, self._most_together, _check) as (size, answer):
                    together.run(self._calls(), size, answer, self._done, self._pipeline.model.device)
            except Exception as error:  # raised by a model or by us: the service goes on
                for number in list(self._begun):
                    self._done(number, None, error)
            self._pipeline.model.config._attn_implementation = self._attention  # the host leaves another for words
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            for request in waiting:
                self._end(request, Failed(503, STOPPED))

    def _calls(self) -> Iterator[Callable[[], Any] | None]:
        """Work on each request that waits, the oldest first; None while there is none."""
        number = 0
        while True:
            request = self._next()
            if request is not None:
                self._begun[number] = request
                self.counts.running = len(self._begun)
            yield None if request is None else functools.partial(_worked, request)
            number += 1

    def _next(self) -> SpeechRequest | None:
        with self._changed:
            while self._waiting and not self._is_closed:
                request = self._waiting.popleft()
                self.counts.queued = len(self._waiting)
                if not request.is_over and request.deadline < time.monotonic():
                    self._end(request, Failed(504, EXPIRED))
                if not request.is_over:
                    self.latencies.left_queue([(request, 0)])
                    return request
        return None

    def _done(self, number: int, result: Any, error: Exception | None) -> None:
        request = self._begun.pop(number)
        self.counts.running = len(self._begun)
        if isinstance(error, _Unwanted):
            result = Failed(504, EXPIRED)
        elif error is not None:
            result = failures.failed_by(error)
            self._is_lost = self._is_lost or failures.is_lost(result, self._pipeline.model.device)
        with self._changed:
            self._end(request, result)

    def _end(self, request: SpeechRequest, result: Any) -> None:
        """Tell the listener, unless the request is over. The lock is held."""
        if request.is_over:
            return
        request.is_over = True
        if isinstance(result, Failed):
            self.counts.failed += 1
            self.counts.expired += result.status == 504
        else:
            self.counts.finished += 1
        request.listener(result)


def _worked(request: SpeechRequest) -> Any:
    _current.set(request)
    _check()
    return request.work()
