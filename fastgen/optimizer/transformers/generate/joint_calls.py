"""Says whether a call of `generate` runs in turn with others, and so hands the search to a batch of all of them.

The batch is in `joint_batch`; here is what `dispatch` has to know of it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fastgen.optimizer import together
from fastgen.optimizer.transformers.request import Request


class Joint(Protocol):
    """Runs requests of several calls together."""

    def run(self, request: Request, stock: Callable[..., Any], alone: Callable[..., Any]) -> Any:
        """What `alone(request, stock)` returns, perhaps in a batch with others; for code that runs in turn."""


_joint: contextvars.ContextVar[Joint | None] = contextvars.ContextVar("fastgen_joint", default=None)


def current() -> Joint | None:
    """Where the requests of this code go; None if it is no part of a call that runs in turn with others."""
    return _joint.get() if together.is_inside() else None


@contextlib.contextmanager
def joining(joint: Joint) -> Iterator[None]:
    """Inside the block, requests of calls that `together.run` runs go to `joint`."""
    token = _joint.set(joint)
    try:
        yield
    finally:
        _joint.reset(token)
