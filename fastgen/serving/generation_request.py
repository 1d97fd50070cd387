"""A request to the engine, and the events that the request's listener gets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastgen.pipeline.transformers.hypotheses import Hypotheses


class Finished(NamedTuple):
    """Event: an input has been generated."""

    which: int
    found: Hypotheses


class Grown(NamedTuple):
    """Event: all tokens of an input that are decided so far, for a request that streams."""

    which: int
    rows: list[list[int]]  # of each sample, or of the best hypothesis of beams
    scores: list[float | None]  # of the samples that have ended, while others go on


class Failed(NamedTuple):
    """Event: the request has ended without an answer."""

    status: int  # HTTP status
    message: str


Event = Finished | Grown | Failed


class Full(Exception):
    """Raised if the queue is full."""


class Stopped(Exception):
    """Raised if the engine has ended, or the device is lost."""


@dataclass(eq=False)
class GenerationRequest:
    """A request: inputs with the same options."""

    inputs: list[list[int]]  # tokens
    config: Any  # GenerationConfig
    key: Hashable  # equal for requests with equal options
    listener: Callable[[Event], None]  # called in the engine's thread; must not wait
    stop: tuple[str, ...] = ()  # texts that end a hypothesis, decoded by the host's own `generate`
    seed: int = 0
    streams: bool = False
    deadline: float = float("inf")  # of time.monotonic()
    since: float = field(default_factory=time.monotonic)
    waiting: deque[int] = field(default_factory=deque)  # inputs that are not in a batch yet
    left: set[int] = field(default_factory=set)  # inputs that are not finished
    complete: set[int] = field(default_factory=set)  # inputs that the listener has ended, see `Engine.complete`
    first_tokens: dict[int, float] = field(default_factory=dict)  # when each input's was chosen, as time.monotonic()
    is_over: bool = False

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.inputs)))
        self.left.update(self.waiting)

    @property
    def rows(self) -> int:
        """The number of rows of each input: beams or samples."""
        return max(int(self.config.num_beams or 1), int(self.config.num_return_sequences or 1))
