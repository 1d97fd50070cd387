"""Suspends functions of the host in the middle, by running each in a thread of its own."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch

_PATIENCE = 1.0  # s


class _Abandoned(BaseException):  # no `except Exception` of the host is to catch it
    """Raised in a suspended function to end it, when nobody waits for the result any more."""


class Stopped(Exception):
    """Wraps a StopIteration of a function: raised as it is, it would end the generator that resumed the function."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


class Suspendable:
    """A function in a thread of its own; either that thread or the one that resumes it runs, never both.

    Once it is closed the function's thread may still be ending, beside the one that has closed it.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.ended = False
        self.result: Any = None
        self._function: Callable[[], Any] | None = function
        self._questions: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._device = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._inference = torch.is_inference_mode_enabled()
        context = contextvars.copy_context()  # with the caller's settings
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="fastgen-suspended", daemon=True)

    def resume(self, answer: Any = None) -> Any:
        """Start the function, or resume it with `answer`; returns its next question, None once it has `ended`.

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
            try:
                raise Stopped(value) if isinstance(value, StopIteration) else value
            finally:
                del value  # whose traceback has this frame
        self.result = value
        return None

    def ask(self, question: Any) -> Any:
        """Called by the function, in its own thread: suspend the function until there is an answer."""
        self._questions.put(("asked", question))
        answer = self._answers.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer

    def close(self) -> None:
        """End the function where it is suspended.

        It is waited for, but not for long: the garbage collector may close this in a thread that holds what the
        function's thread needs.
        """
        if self._thread.is_alive():
            self._answers.put(_Abandoned())
            self._thread.join(_PATIENCE)
        self.ended = True

    def _run(self) -> None:
        function, self._function = self._function, None  # which may know this object: what it holds is freed at the end
        assert function is not None
        try:
            with self._as_the_caller():
                result = function()
        except BaseException as error:  # raised again in the thread that resumed it
            self._questions.put(("failed", error))
        else:
            self._questions.put(("ended", result))

    @contextlib.contextmanager
    def _as_the_caller(self) -> Iterator[None]:
        """Set what torch keeps for each thread, CUDA stream and inference mode, as in the caller's thread."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(torch.cuda.stream(self._device))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            yield
