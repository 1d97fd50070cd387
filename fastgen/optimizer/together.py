"""Runs several calls of a host in turn: each up to where it needs a step of the model, then one step for all.

A call is the host's own code, which knows nothing of the others, so each has a thread; but one thread at a time works,
and large operations are those of the calling thread (`outside`, `need`). For torch gives each thread that computes
some threads of its own, and idle ones cost everybody: with those of 8 callers a step takes a fifth longer. (Greenlets
need no threads, but torch's errors look at the stack, and crash where a greenlet's stack ends.)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastgen.optimizer.suspending import Stopped, Suspendable
from fastgen.optimizer.verification import RandomState

_call: contextvars.ContextVar[Suspendable | None] = contextvars.ContextVar("fastgen_call_together", default=None)


def is_inside() -> bool:
    """Whether this code is part of a call that `run` runs with others."""
    return _call.get() is not None


def need(what: Any) -> Any:
    """The answer to `what`, once every other call needs something, too. Only for code that `is_inside`."""
    return _asked(what)


def outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`; for code that `is_inside` the thread that called `run` runs it, at once.

    It sees the context variables of this code, but nothing in it is inside. Not for code that `is_apart`.
    """
    if not is_inside():
        return function(*args, **kwargs)
    context = contextvars.copy_context()
    context.run(_call.set, None)
    return _asked(_Task(lambda: context.run(function, *args, **kwargs)))


def run(
    calls: Iterable[Callable[[], Any] | None],
    size: int,
    answer: Callable[[dict[int, Any]], Mapping[int, Any]],
    done: Callable[[int, Any, Exception | None], None],
    device: torch.device,
) -> None:
    """Run all `calls`, at most `size` at a time.

    Each has the caller's context variables, and random numbers of its own on the CPU and on `device`: what it would
    draw if it were the first to be called. With a size of 0 calls follow one another in this thread; so they do where
    torch has a mode, or autocast, of this thread alone.

    Args:
        calls: taken one by one, when there is room. None stands for: there is none at present, ask again later.
        answer: from what the calls need, by the call's number, to an answer for each. What it raises is raised in each
            of these calls.
        done: called with a call's number and the result, or the error that it ended with.
    """
    upcoming = enumerate(calls)
    with (
        torch.no_grad(),
        contextlib.closing(_Running(device, done)) as running,
    ):  # as the hosts decode, in other threads
        if size < 1 or is_inside() or is_apart(device):
            for number, call in upcoming:
                if call is None:
                    break
                running.alone(number, call)
            return
        while True:
            while running.size < size:
                number, call = next(upcoming, (0, None))
                if call is None:
                    break
                running.begin(number, call)
            if not running.needs:
                return
            for number, found in _answers(running.needs, answer).items():
                running.resume(number, found)


def _answers(needs: dict[int, Any], answer: Callable[[dict[int, Any]], Mapping[int, Any]]) -> dict[int, _Answer]:
    try:
        return {number: _Answer(found) for number, found in answer(dict(needs)).items()}
    except Exception as error:  # raised again in each call
        return {number: _Answer(error=error) for number in needs}


def is_apart(device: torch.device) -> bool:
    """Whether this thread has a state of torch's that other threads have not: a mode, or autocast."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return modes > 0 or any(torch.is_autocast_enabled(kind) for kind in {"cpu", device.type})


def _asked(what: Any) -> Any:
    call = _call.get()
    assert call is not None
    answer: _Answer = call.ask(what)
    if answer.error is not None:
        raise answer.error
    return answer.found


class _Answer(NamedTuple):
    found: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Task:
    """Something to be run outside."""

    run: Callable[[], Any]

    def answer(self) -> _Answer:
        try:
            return _Answer(self.run())
        except Exception as error:  # raised again in the call
            return _Answer(error=error)


class _Running:
    """The calls that have begun and not ended. Outside of `begin` and `resume` each of them needs something."""

    def __init__(self, device: torch.device, done: Callable[[int, Any, Exception | None], None]) -> None:
        self._device, self._done = device, done
        self._threads = 0  # of torch in the calling thread, once a call has begun
        self._calls: dict[int, Suspendable] = {}
        self._random: dict[int, RandomState] = {}  # of those that have drawn random numbers
        self.needs: dict[int, Any] = {}

    @property
    def size(self) -> int:
        return len(self._calls)

    def begin(self, number: int, call: Callable[[], Any]) -> None:
        threads = self._threads = torch.get_num_threads()

        def body() -> Any:
            _call.set(suspended)
            torch.get_num_threads()  # or the first operation would set the number anew
            torch.set_num_threads(1)
            outside(torch.set_num_threads, threads)  # threads to come have as many as before
            return call()

        suspended = self._calls[number] = Suspendable(body)
        self.resume(number, _Answer())

    def alone(self, number: int, call: Callable[[], Any]) -> None:
        """Run a call in this thread."""
        try:
            with self._drawing(number):
                result = contextvars.copy_context().run(call)
        except Exception as error:  # a call that fails ends alone
            self._end(number, None, error)
        else:
            self._end(number, result, None)

    def resume(self, number: int, answer: _Answer) -> None:
        """Go on with a call, up to what it needs next or to the end."""
        call = self._calls[number]
        self.needs.pop(number, None)
        try:
            with self._drawing(number):
                while isinstance(what := call.resume(answer), _Task):
                    answer = what.answer()
        except Stopped as stopped:
            self._end(number, None, stopped.error)
        except Exception as error:  # a call that fails ends alone
            self._end(number, None, error)
        else:
            if call.ended:
                self._end(number, call.result, None)
            else:
                self.needs[number] = what

    @contextlib.contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        """Inside the block a call draws from random numbers of its own; outside, none have been drawn."""
        outside = RandomState(self._device)
        own = self._random.get(number, outside)
        if own is not outside:
            own.restore()
        try:
            yield
        finally:
            now = outside.now()
            if not now.is_as(own):
                self._random[number] = own = now
            if own is not outside:
                outside.restore()

    def _end(self, number: int, result: Any, error: Exception | None) -> None:
        self._calls.pop(number, None)
        self._random.pop(number, None)
        self._done(number, result, error)

    def close(self) -> None:
        """End calls that are still here, so that they free what they hold."""
        try:
            while self._calls:
                self._calls.popitem()[1].close()
        finally:
            if self._threads:
                torch.set_num_threads(self._threads)  # if a call was ended before it could say so
