"""Runs calls of a host in turn, and those that do not fit into memory beside others once more, alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fastgen.memory import limits
from fastgen.optimizer import together
from fastgen.pipeline.batching import release_memory

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    """A call of the host's."""

    run: Callable[[], Any]
    ended: Callable[[Any, Exception | None], None]  # called with what it returns, or raises


def run_all(
    calls: Iterable[Call], size: int, answer: Callable[[dict[int, Any]], Mapping[int, Any]], device: torch.device
) -> None:
    """Run all calls, `size` at a time, or one after the other if it is 0: see `together.run`."""
    begun: dict[int, Call] = {}
    again: list[Call] = []

    def taken() -> Iterator[Callable[[], Any]]:
        for number, call in enumerate(calls):
            begun[number] = call
            yield call.run

    def done(number: int, result: Any, error: Exception | None) -> None:
        call = begun.pop(number)
        if size > 1 and error is not None and limits.is_out_of_memory(error):
            again.append(call)
        else:
            call.ended(result, error)

    together.run(taken(), size, answer, done, device)
    if again:
        release_memory()
        alone = [call.run for call in again]
        together.run(alone, 0, answer, lambda number, *ended: again[number].ended(*ended), device)


def outside(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with large operations: it is run outside of the calls that run in turn."""

    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        return together.outside(stock, *args, **kwargs)

    return run
