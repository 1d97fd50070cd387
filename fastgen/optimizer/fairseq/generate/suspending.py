"""Functions of the host's that are suspended in the middle, which only a thread of their own can be."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch


class _Abandoned(BaseException):  # no `except Exception` of the host's is to see it
    """Ends a function that nobody waits for any more."""


class Stopped(Exception):
    """A function has raised `error`, a StopIteration: raised as it is, it would end the generator that resumed it."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


class Suspendable:
    """A function in a thread of its own, which never runs beside the one that resumes it: it waits or we do."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.ended = False
        self.result: Any = None
        self._function = function
        self._questions: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._device = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._inference = torch.is_inference_mode_enabled()
        context = contextvars.copy_context()  # the caller's settings
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="fastgen-suspended", daemon=True)

    def resume(self, answer: Any = None) -> Any:
        """Let it run, at first or on with this answer, to what it asks next (returned) or its end (see `ended`).

        Raises what the function raises; a StopIteration as `Stopped`.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        kind, value = self._questions.get()
        if kind == "asked":
            return value
        self.ended = True
        self._thread.join()
        if kind == "failed":
            raise Stopped(value) if isinstance(value, StopIteration) else value
        self.result = value
        return None

    def ask(self, question: Any) -> Any:
        """Called by the function, in its thread: suspend it until there is an answer."""
        self._questions.put(("asked", question))
        answer = self._answers.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer

    def close(self) -> None:
        """End it where it is suspended."""
        if self._thread.is_alive():
            self._answers.put(_Abandoned())
            self._thread.join()
        self.ended = True

    def _run(self) -> None:
        try:
            with self._as_the_caller():
                result = self._function()
        except BaseException as error:  # raised again in the thread that resumed it
            self._questions.put(("failed", error))
        else:
            self._questions.put(("ended", result))

    @contextlib.contextmanager
    def _as_the_caller(self) -> Iterator[None]:
        """What torch keeps for each thread."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(torch.cuda.stream(self._device))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            yield
