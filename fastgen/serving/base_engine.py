"""What the engines of texts and of speech share: a thread, the ends of requests, and counts of both."""

from __future__ import annotations

import threading
from typing import Any

from fastgen.serving import failures
from fastgen.serving.counts import Counts
from fastgen.serving.generation_request import Failed, Full, Stopped
from fastgen.serving.latencies import Latencies, Request

STOPPED = "The engine has stopped: send the request again later."
EXPIRED = "The request took longer than it may: ask for fewer tokens, or give it a longer `timeout`."


class BaseEngine:
    """Works on requests from any thread, in a thread of its own, which a subclass starts."""

    def __init__(self, model: Any, most_queued: int, *, before_first: int) -> None:
        """`before_first`: see `Latencies`."""
        self.counts, self.latencies = Counts(), Latencies(before_first)
        self._model, self._most_queued = model, most_queued
        self._changed = threading.Condition()
        self._is_closed = self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="fastgen-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def cancel(self, request: Request) -> None:
        """Cancel a request to which nobody listens, from any thread; the work ends at the next step, or window."""
        with self._changed:
            if not request.is_over:
                request.is_over = True
                self.counts.cancelled += 1
            self._changed.notify()

    def close(self) -> None:
        """End the thread; unfinished requests fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._is_closed or not self.is_alive:
            raise Stopped

    def _count(self, inputs: int, *, is_full: bool) -> None:
        """Count a request that has come. Raises Full or, if the engine has ended, Stopped. The lock is held."""
        self._check_open()
        if is_full:
            self.counts.refused += 1
            raise Full
        self.counts.requests += 1
        self.counts.inputs += inputs

    def _end(self, request: Request, result: Any) -> None:
        """Tell the listener how the request has ended, unless it is over."""
        with self._changed:  # or the listener might cancel it, too
            if request.is_over:
                return
            if isinstance(result, Failed):
                self.counts.failed += 1
                self.counts.expired += result.status == 504
            else:
                self.counts.finished += 1
            request.listener(result)
            request.is_over = True

    def _failure(self, error: Exception) -> Failed:
        failed = failures.failed_by(error)
        self._is_lost = self._is_lost or failures.is_lost(failed, self._model.device)
        return failed
