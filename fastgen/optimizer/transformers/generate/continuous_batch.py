"""A batch kept full: several calls of `generate` decode together, and as sentences leave the next call joins in.

Each call keeps its own search, processors and prompt; the tree and the model's forward passes are shared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fastgen import report
from fastgen.optimizer.transformers.generate.batch_decoder import BatchDecoder
from fastgen.optimizer.transformers.generate.suspended_call import Call, PlannedCaches

_MOST_CALLS = 8  # at once, unless more are asked for: each adds its own few small operations to a step


def run(model: Any, calls: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[tuple[int, Any]]:
    """What `model.generate(**call)` returns for each of `calls`, with the call's number, as it is ready.

    A call begins when there is room for its sentences among the `batch_size` that decode together; one that cannot
    be decoded with others runs alone. All calls have the same options: they differ in their inputs.
    """
    waiting = enumerate(calls)
    following = next(waiting, None)
    with contextlib.closing(ContinuousBatch(model, batch_size)) as running:
        while following is not None or running.calls:
            while following is not None and running.has_room(_sentences(following[1])):
                call = running.admit(*following)
                following = next(waiting, None)
                if call.ended:
                    yield call.number, call.result
            for call in running.step():
                yield call.number, call.result


class ContinuousBatch:
    """A batch that calls of `model.generate` enter and leave while it decodes. All have the same number of beams."""

    def __init__(self, model: Any, batch_size: int, most_calls: int = _MOST_CALLS) -> None:
        """`close` it in the end. At most `batch_size` sentences, of at most `most_calls` calls, decode together."""
        self._model, self._size, self._most_calls = model, batch_size, most_calls
        self.planned = PlannedCaches()
        self._joint: BatchDecoder | None = None
        self._live: list[Call] = []
        self._entering: list[Call] = []
        self._started, self._admitted = time.perf_counter(), 0

    @property
    def calls(self) -> list[Call]:
        """The calls that have not ended."""
        return [*self._live, *self._entering]

    def has_room(self, sentences: int) -> bool:
        """Whether a call of so many sentences may enter now. If there is no other, it may."""
        calls = self.calls
        taken = sum(call.sentences for call in calls)
        return not calls or (len(calls) < self._most_calls and taken + sentences <= self._size)

    def admit(
        self, number: int, kwargs: Mapping[str, Any], *, tokens: bool = False, seeds: Sequence[int] | None = None
    ) -> Call:
        """Begin `model.generate(**kwargs)`: its prompts are read. It may have ended when this returns.

        Args:
            number: whatever the caller knows it by.
            tokens: greedy search and sampling are wanted in the batch, too, and `found` for each sentence.
            seeds: of each sentence's samples.
        """
        call = Call(number, tokens)
        call.generate(self._model, self.planned, kwargs, seeds)
        self.enter(call)
        return call

    def enter(self, call: Call) -> None:
        """Let a call that has begun take part in the steps, unless it has ended."""
        if not call.ended:
            self._entering.append(call)
            self._admitted += call.request.batch

    def step(self) -> list[Call]:
        """One step for all sentences; returns the calls that have ended."""
        if not self.calls:
            return []
        if self._joint is None:
            self._joint = BatchDecoder(self._entering[0].request, self._size, self.planned.layer_caches)
        self._joint.regroup(self._entering)
        self._entering = []
        if self._joint.calls:
            self._joint.step_all()
        self._live = [call for call in self._joint.calls if not call.ended]
        return [call for call in self._joint.calls if call.ended]

    def close(self) -> None:
        """Let go of the tree, and report."""
        if self._joint is not None:
            joint, seconds = self._joint, time.perf_counter() - self._started
            how = joint.steps, seconds, joint.cache_bytes(), joint.cache_kind(), self.planned.plan
            name = type(self._model).__name__
            report.record(report.Call("transformers", name, "fast", None, self._admitted, joint.beams, *how))
            joint.close()  # which forgets what it had
            self._joint = None


def _sentences(kwargs: Mapping[str, Any]) -> int:
    return int(next(value.shape[0] for value in kwargs.values() if isinstance(value, Tensor)))
