"""Tells a listener what a beam search has decided, step by step; used for every host."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from fastgen.decoding.front import Contenders, DecidedFront

_S = TypeVar("_S")  # a search
Put = Callable[[Tensor], None]  # gets one column, int64 `[B]` on the CPU: the next token of each sentence


class Listener:
    """Listens to one search of one sentence, for hosts that have no streamers of their own."""

    def __init__(self, put: Put) -> None:
        self.put = put
        self.has_begun = False

    def begin(self, sentences: int) -> None:
        """A search of so many sentences begins; ValueError if it is not the only sentence."""
        if self.has_begun or sentences != 1:
            also = "another search begins" if self.has_begun else f"this call has {sentences} sentences"
            raise ValueError(f"fastgen.stream takes one input at a time: {also}.")
        self.has_begun = True


_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("fastgen_listener", default=None)


class BeamStreaming(Generic[_S]):
    """Passes on the tokens of each sentence's best hypothesis as they are decided, one column at a time."""

    def __init__(self, put: Put, start: int, of: Callable[[_S, int, bool], Contenders], only_falls: bool) -> None:
        """`of`: one of the functions `of_...` in `fastgen.decoding.front`, with its `only_falls`; `start`: tokens that
        every hypothesis begins with."""
        self._put, self._of, self._only_falls = put, of, only_falls
        self._front = DecidedFront(start)

    def follow(self, search: _S) -> None:
        """Pass on what a step of the search has decided. No sentence may have left the batch."""
        self._pass_on(self._front.advance(self._of(search, self._front.length, self._only_falls)))

    def finish(self, best: Tensor) -> None:
        """Pass on the rest of the best hypotheses, int64 `[B, L]`, without the tokens at the start.

        Raises ValueError: see `DecidedFront.finish`.
        """
        self._pass_on(self._front.finish(best))

    def _pass_on(self, columns: Tensor) -> None:
        for column in columns:
            self._put(column)


@contextlib.contextmanager
def listening(put: Put) -> Iterator[Listener]:
    """Inside the block, `put` gets the columns of the search that this thread, or asyncio task, runs."""
    listener = Listener(put)
    token = _listener.set(listener)
    try:
        yield listener
    finally:
        _listener.reset(token)


def listener() -> Listener | None:
    """What listens to this thread's search, or None."""
    return _listener.get()
