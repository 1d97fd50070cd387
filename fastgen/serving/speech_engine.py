"""Writes down speech in one thread: recordings come and go, and their windows share the steps of the decoder.

Each recording is a call of the host's own pipeline, as `fastgen.transcribe` makes it; the next one begins when there is
room, while others are at work.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastgen.memory import limits
from fastgen.optimizer import together
from fastgen.pipeline.batching import release_memory
from fastgen.pipeline.transcription.pipelines import sharing_steps
from fastgen.serving.base_engine import STOPPED, BaseEngine
from fastgen.serving.generation_request import Failed, Full

LATE = "The recording took longer than it may: send a shorter one or a longer `timeout`, up to the service's --timeout."


@dataclass(eq=False)
class SpeechRequest:
    """A recording that is to be written down."""

    work: Callable[[], Any]  # calls the pipeline; what it returns goes to the listener
    listener: Callable[[Any], None]  # called once, in the engine's thread, with that or with Failed; must not wait
    deadline: float = float("inf")  # of time.monotonic()
    size: int = 0  # bytes of the sound in memory, which are held until the request has ended
    sets_attention: bool = False  # the host sets the model's attention for it, for times of words, and leaves it so
    since: float = field(default_factory=time.monotonic)
    is_over: bool = False
    is_alone: bool = False  # it did not fit into memory beside others: nothing else is to run meanwhile


class _Unwanted(Exception):
    """Ends the work on a recording for which nobody waits any more."""


_current: contextvars.ContextVar[SpeechRequest | None] = contextvars.ContextVar("fastgen_speech", default=None)


def _check() -> None:
    """Raise _Unwanted within the work on a recording that is cancelled or late."""
    request = _current.get()
    if request is not None and (request.is_over or request.deadline < time.monotonic()):
        raise _Unwanted


class SpeechEngine(BaseEngine):
    """Works on recordings from any thread, in a thread of its own."""

    def __init__(self, pipeline: Any, *, most_together: int, most_queued: int) -> None:
        """Start the engine, which `close` ends.

        Args:
            pipeline: for speech recognition, of transformers.
            most_together: the most recordings whose windows decode together.
            most_queued: the most recordings that may wait.
        """
        super().__init__(pipeline.model, most_queued, before_first=0)
        self._pipeline, self._most_together = pipeline, most_together
        self._attention = pipeline.model.config._attn_implementation
        self._waiting: deque[SpeechRequest] = deque()
        self._again: deque[SpeechRequest] = deque()  # which are tried once more, alone
        self._begun: dict[int, SpeechRequest] = {}  # by number of the call
        self._thread.start()

    def submit(self, request: SpeechRequest) -> None:
        """Queue a request. Raises Full or, if the engine has ended, Stopped."""
        with self._changed:
            self._count(1, is_full=self._is_full(request.size))
            self._waiting.append(request)
            self.counts.queued = len(self._waiting)
            self._changed.notify()

    def check_room(self) -> None:
        """Raise what `submit` would raise for the shortest recording."""
        with self._changed:
            self._check_open()
            if self._is_full(0):
                self.counts.refused += 1
                raise Full

    def cancel(self, request: SpeechRequest) -> None:  # type: ignore[override]  # it gets no others
        """Cancel a request to which nobody listens, from any thread; one that waits leaves the queue."""
        with self._changed:
            super().cancel(request)
            if request in self._waiting:
                self._waiting.remove(request)
                self.counts.queued = len(self._waiting)
            if request in self._again:
                self._again.remove(request)

    def _is_full(self, size: int) -> bool:
        """Whether a recording of so many bytes finds no place in the queue, or too little memory. The lock is held."""
        held = sum(one.size for one in [*self._waiting, *self._again, *self._begun.values()])
        is_too_much = held > 0 and not limits.may_keep(size, held)
        return len(self._waiting) >= self._most_queued or is_too_much

    def close(self) -> None:
        """End the thread; unfinished requests fail."""
        with self._changed:
            self._is_closed = True  # now, so that none begins in between
            for request in [*self._begun.values(), *self._again]:  # which end before the next window
                self._end(request, Failed(503, STOPPED))
        super().close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._again or self._is_closed or self._is_lost)
                if self._is_closed or self._is_lost:
                    break
            try:
                with sharing_steps(self._pipeline, self._most_together, _check) as (size, answer):
                    together.run(self._calls(), size, answer, self._done, self._model.device)
            except Exception as error:  # raised by a model or by us: the service goes on
                for number in list(self._begun):
                    self._done(number, None, error)
        with self._changed:
            self._is_closed = True  # if the device is lost, too: nobody would answer who comes from now on
            waiting = [*self._again, *self._waiting]
            self._again, self._waiting = deque(), deque()
            for request in waiting:
                self._end(request, Failed(503, STOPPED))

    def _calls(self) -> Iterator[Callable[[], Any] | None]:
        """Work on each request that waits, the oldest first; None while there is none."""
        number = 0
        while True:
            request = self._next()
            if request is not None:
                if request.is_alone:
                    release_memory()
                self._begun[number] = request
                self.counts.running = len(self._begun)
            yield None if request is None else functools.partial(_worked, request)
            number += 1

    def _next(self) -> SpeechRequest | None:
        with self._changed:
            if self._is_closed or any(one.is_alone for one in self._begun.values()):
                return None
            if self._again:
                return None if self._begun else self._again.popleft()
            while self._waiting:
                request = self._waiting.popleft()
                self.counts.queued = len(self._waiting)
                if request.deadline < time.monotonic():
                    self._end(request, Failed(504, LATE))
                if not request.is_over:
                    self.latencies.left_queue([(request, 0)])
                    return request
        return None

    def _done(self, number: int, result: Any, error: Exception | None) -> None:
        request = self._begun.pop(number)
        self.counts.running = len(self._begun)
        if request.sets_attention and not any(one.sets_attention for one in self._begun.values()):
            self._model.config._attn_implementation = self._attention
        if error is not None and limits.is_out_of_memory(error) and self._may_try_again(request):
            return
        if isinstance(error, _Unwanted):
            result = Failed(504, LATE)
        elif error is not None:
            result = self._failure(error)
        self._end(request, result)

    def _may_try_again(self, request: SpeechRequest) -> bool:
        """Whether a request that has run out of memory is tried once more, alone: it was beside others, perhaps."""
        with self._changed:
            if request.is_alone or request.is_over or self._most_together < 2:
                return False
            request.is_alone = True
            self._again.append(request)
            return True


def _worked(request: SpeechRequest) -> Any:
    _current.set(request)
    _check()
    return request.work()
