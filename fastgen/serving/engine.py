"""Generates in one thread: requests enter and leave batches that run all the time.

Requests with the same number of beams decode together, whatever their other options; requests that arrive together with
the same options are one call of `generate`. Requests that cannot share a batch (beam sampling, models whose sentences
cannot be at different positions) are decoded by the host's own `generate`, those with the same options together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from fastgen.memory.limits import is_out_of_memory
from fastgen.optimizer.transformers.generate.continuous_batch import ContinuousBatch
from fastgen.optimizer.transformers.generate.shareable import unrefillable
from fastgen.optimizer.transformers.generate.suspended_call import Call, Decided, Found
from fastgen.pipeline.batch_effects import rotates_by_longest
from fastgen.pipeline.batching import release_memory
from fastgen.pipeline.transformers.hypotheses import Hypotheses, hypotheses_of, own_tokens
from fastgen.serving.apart import generate_apart
from fastgen.serving.base_engine import EXPIRED, STOPPED, BaseEngine
from fastgen.serving.generation_request import Failed, Finished, GenerationRequest, Grown, Stopped
from fastgen.serving.grouping import Unit, call_of, groups, halves

_IDLE_SECONDS = 0.5  # between looks at the clock while there is nothing to do
_MOST_OPTIONS = 1000  # of which it is remembered whether they can share a batch
_JOINS_FROM = 1 / 8  # of the sentences in the batch: fewer new ones wait for others, as each call costs a search,
_PATIENCE_SECONDS = 0.25  # but at most so long
_MANY_CALLS = 8  # in a batch: further ones wait until one has ended,
_LONGEST_PATIENCE_SECONDS = 1.0  # but at most so long


class Engine(BaseEngine):
    """Generates for requests from any thread, in a thread of its own."""

    def __init__(self, model: Any, tokenizer: Any = None, *, most_rows: int = 256, most_queued: int = 1024) -> None:
        """Start the engine, which `close` ends.

        Args:
            model: a model of Hugging Face transformers, on its device, in evaluation mode.
            tokenizer: for requests with texts that end a hypothesis.
            most_rows: the most rows, inputs times beams, that decode together.
            most_queued: the most inputs that may wait.
        """
        super().__init__(model, most_queued, before_first=1 if model.config.is_encoder_decoder else 0)
        self._tokenizer, self._most_rows = tokenizer, most_rows
        self._requests: list[GenerationRequest] = []  # requests that have inputs waiting, the oldest first
        self._batches: dict[int, ContinuousBatch] = {}  # by number of rows of each input
        self._units: dict[int, list[Unit]] = {}  # inputs by number of the call
        self._tasks: deque[tuple[Future[Any], Callable[[Any], Any]]] = deque()  # of the model, beside all batches
        self._apart: dict[Hashable, bool] = {}  # by options: whether they can't share a batch
        self._rest_until = 0.0  # time.monotonic() from which others may decode apart while a batch runs
        self._calls = 0
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, whose listener gets each result. Raises Full or, if the engine has ended, Stopped."""
        if not self._model.config.is_encoder_decoder:
            options = {"generation_config": request.config}
            request.key = request.key, rotates_by_longest(self._model, options, request.inputs)
        with self._changed:
            queued = sum(len(one.waiting) for one in self._requests if not one.is_over)
            is_full = queued > 0 and queued + len(request.inputs) > self._most_queued
            self._count(len(request.inputs), is_full=is_full)
            self._requests.append(request)
            self._changed.notify()

    def complete(self, request: GenerationRequest, index: int, tokens: Sequence[int]) -> bool:
        """End an input whose rows need no more than so many `tokens`, from any thread: no event follows. False if it
        has ended.
        """
        with self._changed:
            if request.is_over or index not in request.left:
                return False
            request.complete.add(index)
            self.counts.tokens += sum(tokens)
            request.left.discard(index)
            self.latencies.finished(request, index, max(tokens))
            request.is_over = not request.left
            self.counts.finished += request.is_over
        return True

    def with_model(self, task: Callable[[Any], Any]) -> Future[Any]:
        """Call `task` with the model, in the engine's thread, one between two steps; the future has what it returns."""
        future: Future[Any] = Future()
        with self._changed:
            self._check_open()
            self._tasks.append((future, task))
            self._changed.notify()
        return future

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                with self._changed:
                    busy = any(batch.calls for batch in self._batches.values())
                    if not (busy or self._requests or self._tasks or self._is_closed):
                        self._clear()
                        self._changed.wait(_IDLE_SECONDS)
                    if self._is_closed:
                        break
                try:
                    self._turn()
                except Exception as error:  # raised by a model or by us: the service goes on
                    self._fail_all(error)
                if self._is_lost:
                    break
        with self._changed:
            self._is_closed = True  # if the device is lost, too: nobody would answer who comes from now on
        self._fail_all(RuntimeError(STOPPED), status=503)

    def _turn(self) -> None:
        if self._tasks:  # one between two steps, so that those of many streams slow down no batch by more
            future, task = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task(self._model))
                except Exception as error:  # raised again by whoever asked
                    future.set_exception(error)
        self._expire()
        self._admit()
        for batch in list(self._batches.values()):
            for call in batch.calls:
                for row, (request, index) in enumerate(self._units[call.number]):
                    is_cancelled = request.is_over and index in request.left
                    if (is_cancelled or index in request.complete) and row not in call.decoder.abandoned:
                        call.abandon(row)
                        self.counts.freed_rows += call.decoder.beams
            calls = batch.calls
            if calls:
                self.counts.steps += 1
                self.counts.rows += sum(call.rows for call in calls)
            batch.step()
            for call in calls:
                self._deliver(call)
        for rows in [rows for rows, batch in self._batches.items() if not batch.calls]:
            self._batches.pop(rows).close()  # otherwise the memory would be kept while other batches are busy
        with self._changed:
            self.counts.running = sum(call.rows for batch in self._batches.values() for call in batch.calls)
            self.counts.queued = sum(len(request.waiting) for request in self._requests)

    def _expire(self) -> None:
        """Fail requests past the deadline, and forget waiting requests that are over."""
        now = time.monotonic()
        with self._changed:
            known = {id(request): request for units in self._units.values() for request, _ in units}
            for request in [*self._requests, *known.values()]:
                if request.deadline < now:
                    self._end(request, Failed(504, EXPIRED))
            self._requests = [request for request in self._requests if request.waiting and not request.is_over]

    def _admit(self) -> None:
        """Begin waiting inputs as far as there is room, the oldest first, with later ones of the same options."""
        with self._changed:
            requests = list(self._requests)
        for request in requests:
            self._find_out(request)
        while (units := self._next()) is not None:
            request, _ = units[0]
            calls = groups(self._model, units)
            if self._apart[request.key]:
                began = time.monotonic()
                for group in calls:
                    self._generate_apart(group)
                # Let the batches go on in between, for as long as they have waited.
                self._rest_until = 2 * time.monotonic() - began
                break
            for group in calls:
                self._begin(group)

    def _next(self) -> list[Unit] | None:
        """Inputs that may begin now, with the same options."""
        now = time.monotonic()
        with self._changed:
            self._requests = [one for one in self._requests if one.waiting and not one.is_over]
            taken = sum(call.rows for one in self._batches.values() for call in one.calls)
            for request in self._requests:
                is_apart, batch = self._apart.get(request.key), self._batches.get(request.rows)
                if is_apart is None or (is_apart and taken and now < self._rest_until):  # None: it has arrived since
                    continue
                room = (self._most_rows - taken) // request.rows if taken else max(1, self._most_rows // request.rows)
                if room < 1:
                    break  # the oldest first, or a request of many rows would wait for ever
                if batch is not None and batch.calls and not batch.has_room(1):
                    continue
                calls, waited = [] if batch is None else batch.calls, now - request.since
                if len(calls) >= _MANY_CALLS and waited < _LONGEST_PATIENCE_SECONDS:
                    continue
                alike = [one for one in self._requests if one.key == request.key]
                if is_apart and request.config.do_sample:
                    alike, room = [request], 1  # the host has one random stream for a whole batch
                wished = sum(len(one.waiting) for one in alike)
                if len(calls) > 1 and waited < _PATIENCE_SECONDS:
                    here = sum(call.sentences for call in calls)
                    if min(wished, room) < here * _JOINS_FROM:
                        continue
                units: list[Unit] = []
                for one in alike:
                    while one.waiting and len(units) < room:
                        units.append((one, one.waiting.popleft()))
                self._requests = [one for one in self._requests if one.waiting]
                self.latencies.left_queue(units)
                return units
        return None

    def _find_out(self, request: GenerationRequest) -> None:
        """Find out whether requests with these options can share a batch; the longest input is enough for that."""
        if request.key in self._apart:
            return
        if len(self._apart) > _MOST_OPTIONS:
            self._apart.clear()
        try:
            longest = max(range(len(request.inputs)), key=lambda index: len(request.inputs[index]))
            call = call_of(self._model, [(request, longest)])
            is_apart = bool(request.stop) or unrefillable(self._model, call, tokens=True) is not None
            self._apart[request.key] = is_apart
        except Exception as error:
            self._end(request, self._failure(error))

    def _begin(self, units: list[Unit]) -> None:
        """Begin one call for these inputs, the longest first, in the batch for their number of rows."""
        request, _ = units[0]
        batch = self._batches.get(request.rows)
        if batch is None:
            size = max(1, self._most_rows // request.rows)
            batch = self._batches[request.rows] = ContinuousBatch(self._model, size, most_calls=size)
        self._calls += 1
        self._units[self._calls] = units
        try:
            call = batch.admit(
                self._calls, call_of(self._model, units), tokens=True, seeds=[one.seed for one, _ in units]
            )
        except Exception as error:
            del self._units[self._calls]
            if not (is_out_of_memory(error) and len(units) > 1):
                self._fail(units, error)
                return
        else:
            self.latencies.first_tokens(units)
            if call.ended:
                self._deliver(call)
            return
        release_memory()  # only now: the error held frames with tensors
        for half in halves(units):
            self._begin(half)

    def _deliver(self, call: Call) -> None:
        """Pass new results of a call on to the requests' listeners."""
        units = self._units[call.number]
        found, call.found[:] = list(call.found), []
        for one in found:
            request, index = units[one.sentence]
            self._finish(request, index, self._hypotheses(request, index, one, call))
        if call.ended:
            if call.error is not None:
                self._fail([(request, index) for request, index in units if index in request.left], call.error)
            elif call.result is not None:
                self._take_result(call, units)
            del self._units[call.number]  # only now: if something is raised, they are to be failed
            return
        if any(request.streams for request, _ in units):
            for sentence, decided in call.decided().items():
                request, index = units[sentence]
                if request.streams and index in request.left and not request.is_over:
                    request.listener(self._grown(request, index, decided, call))

    def _take_result(self, call: Call, units: list[Unit]) -> None:
        """Take the host's results for inputs without one yet, as they could not share a batch after all."""
        missing = [row for row, (request, index) in enumerate(units) if index in request.left and not request.is_over]
        if missing:
            request, _ = units[0]
            longest = max(len(one.inputs[index]) for one, index in units)
            found = hypotheses_of(self._model, request.config, call.result, longest)
            for row in missing:
                self._finish(*units[row], found[row])

    def _prompt(self, call: Call) -> int:
        """The number of tokens before the first generated one."""
        return 0 if self._model.config.is_encoder_decoder else call.request.input_ids.shape[1]

    def _grown(self, request: GenerationRequest, index: int, decided: Decided, call: Call) -> Grown:
        rows = decided.tokens[:, self._prompt(call) :].tolist()
        each = zip(rows, decided.scores, strict=True)
        return Grown(index, [row if score is None else self._own(row, request) for row, score in each], decided.scores)

    def _hypotheses(self, request: GenerationRequest, index: int, found: Found, call: Call) -> Hypotheses:
        tokens = found.tokens[:, self._prompt(call) :].tolist()
        return Hypotheses([self._own(row, request) for row in tokens], found.scores.tolist())

    def _own(self, row: list[int], request: GenerationRequest) -> list[int]:
        return own_tokens(row, request.config, self._model)

    def _generate_apart(self, units: list[Unit]) -> None:
        """Decode these inputs by the host's own `generate`, to the end."""
        requests = [one for one, _ in units]
        try:
            found = generate_apart(self._model, self._tokenizer, call_of(self._model, units), requests)
        except Exception as error:
            if not (is_out_of_memory(error) and len(units) > 1):
                self._fail(units, error)
                return
        else:
            now = time.monotonic()
            for (one, index), hypotheses in zip(units, found, strict=True):
                if one.deadline < now:  # which may have ended the search before its time
                    self._end(one, Failed(504, EXPIRED))
                self._finish(one, index, hypotheses)
            return
        release_memory()  # only now: the error held frames with tensors
        for half in halves(units):
            self._generate_apart(half)

    def _finish(self, request: GenerationRequest, index: int, found: Hypotheses) -> None:
        with self._changed:  # locked, or the listener might end the input, too
            if index in request.complete:
                return
            self.counts.tokens += sum(map(len, found.tokens))
            if request.is_over:
                return
            request.left.discard(index)
            self.latencies.finished(request, index, max(map(len, found.tokens), default=0))
            self.counts.finished += not request.left  # before the listener is called, which may look at the counts
        request.listener(Finished(index, found))
        if not request.left:
            request.is_over = True

    def _fail(self, units: list[Unit], error: Exception) -> None:
        failed = self._failure(error)
        for request, _ in units:
            self._end(request, failed)

    def _fail_all(self, error: Exception, status: int = 500) -> None:
        """Fail the requests of all batches, whose state is unknown after an error; when stopping, waiting ones, too."""
        units = [unit for call in self._units.values() for unit in call]
        try:
            self._clear()
        except Exception:  # raised by a broken batch, which is replaced by a new one
            self._batches.clear()
            self._units.clear()
        if status == 500:
            self._fail(units, error)
            return
        with self._changed:
            waiting, self._requests = self._requests, []
        for request in [*(request for request, _ in units), *waiting]:
            self._end(request, Failed(status, STOPPED))
        while self._tasks:
            future, _ = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(Stopped())

    def _clear(self) -> None:
        """Close all batches and free their memory."""
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()
        self._units.clear()
        self.counts.running = 0
