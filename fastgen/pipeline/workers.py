"""A pool of spawned worker processes that survives the death of any of them.

In the parent each worker has a pipe and a thread, and it has at most one task. So there is no shared queue whose lock a
killed worker could hold for ever, and a task is lost, and done again, exactly when the worker's pipe breaks. Task and
result alternate on a pipe: neither side ever waits for the other to read.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from fastgen.pipeline.errors import WorkerError

ATTEMPTS = 3  # a task that kills a worker this often is given up
_WATCH_SECONDS = 1.0

Handler = Callable[[Any], Any]


def _serve(connection: Connection, parent: int) -> None:
    """Run a worker: build the handler once, then do tasks until the pipe closes or `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _no_interrupt
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        setup = connection.recv_bytes()
        handler: Handler | None = None
        while True:
            task = connection.recv()
            try:
                if handler is None:
                    build, arguments = pickle.loads(setup)
                    handler = build(*arguments)
                reply = (True, handler(task))
            except Exception:
                reply = (False, traceback.format_exc())
            connection.send(reply)


def _end_with(parent: int) -> None:
    """End this process when `parent` is gone, even in mid-task, or if a fork of the parent holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Block SIGINT in processes started inside the block, so that Ctrl-C can't interrupt their imports."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # which the first process starts, and some Pythons then unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """One process and its pipe."""

    def __init__(self, setup: bytes) -> None:
        context = multiprocessing.get_context("spawn")  # never fork: torch and CUDA have threads in the parent
        self.connection, theirs = context.Pipe()
        # `setup` is not an argument of the process: arguments go through a pipe whose other end stays open here, so if
        # a worker died while it started we would write for ever.
        self._setup: bytes | None = setup
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        with _no_interrupt():
            self.process.start()
        theirs.close()  # otherwise the pipe stays open when the worker dies

    def call(self, task: Any) -> tuple[bool, Any]:
        """Whether the task succeeded, and the result or traceback; EOFError or OSError if the worker died."""
        if self._setup is not None:
            self.connection.send_bytes(self._setup)
            self._setup = None
        self.connection.send(task)
        return self.connection.recv()

    def stop(self, *, kill: bool) -> None:
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class WorkerPool:
    """Calls ``build(*arguments)`` once in each of `count` processes and the handler it returns for every task.

    With `count` 0 the handler runs in the thread that submits. `build` and `arguments` are pickled: they must be a
    module's function and plain data. Tasks and results should be lists, strings and numbers, not tensors.
    """

    def __init__(self, count: int, build: Callable[..., Handler], *arguments: Any) -> None:
        self._build, self._arguments = build, arguments
        self._tasks: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._handler: Handler | None = None
        self._inline = threading.Lock()  # a handler, such as a tokenizer, need not be thread-safe
        self.restarts = 0
        self._setup = pickle.dumps((build, arguments)) if count else b""
        self._workers = [_Worker(self._setup) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._feed, args=(i,), name=f"fastgen-worker-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [pid for worker in self._workers if (pid := worker.process.pid) is not None]

    def submit(self, task: Any) -> Future[Any]:
        """Submit a task; returns the future of the result, whose exception is a WorkerError."""
        future: Future[Any] = Future()
        if self._threads:
            self._tasks.put((task, future))
            return future
        with self._inline:
            try:
                if self._handler is None:
                    self._handler = self._build(*self._arguments)
                future.set_result(self._handler(task))
            except Exception:
                future.set_exception(WorkerError(_failed(traceback.format_exc())))
        return future

    def _feed(self, index: int) -> None:
        while (entry := self._tasks.get()) is not None:
            task, future = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._run(index, task))
                except Exception as error:  # raised again where the result is asked for
                    future.set_exception(error)

    def _run(self, index: int, task: Any) -> Any:
        for _ in range(ATTEMPTS):
            try:
                done, result = self._workers[index].call(task)
            except (EOFError, OSError):
                if self._closed:
                    raise WorkerError("the pool was closed") from None
                self._workers[index].stop(kill=True)
                self._workers[index] = _Worker(self._setup)
                self.restarts += 1
            else:
                if not done:
                    raise WorkerError(_failed(result))
                return result
        raise WorkerError(f"a worker process died {ATTEMPTS} times at the same task")

    def close(self, *, kill: bool = False) -> None:
        """End the workers, after the last task or, with `kill`, at once."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        if not kill:
            for thread in self._threads:
                thread.join()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.stop(kill=kill)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)


def _failed(trace: str) -> str:
    lines = trace.strip().splitlines()
    return f"post-processing failed: {lines[-1]}\n{trace.strip()}"
