"""Runs the stages of a run at the same time: reading | generating | post-processing | writing.

Reading and writing have a thread each, generation stays in the calling thread (signals and CUDA contexts belong
there), a WorkerPool does the post-processing. Channels between them are bounded, so memory is bounded, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")
Note = TypeVar("Note")

DEPTH = 8


class Cancelled(Exception):
    """Raised if the other end of a channel has given up."""


class Channel(Generic[T]):
    """A bounded queue that can be ended: `finish` lets the reader see all items first, `cancel` doesn't."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._items: deque[T] = deque()
        self._depth = depth
        self._changed = threading.Condition()
        self._finished = False
        self._cancelled = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        """Add an item, when there is room; raises Cancelled if nobody will read it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._cancelled)
            if self._cancelled:
                raise Cancelled
            self._items.append(item)
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """End the channel: there are no more items; `error` is raised in the reader after the last one."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def cancel(self) -> None:
        """Wake both sides; items not read are dropped."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._finished or self._cancelled)
                if self._cancelled:
                    raise Cancelled
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item


def run_stages(
    source: Iterable[Item],
    generate: Callable[[Any], tuple[Future[Any], Note] | None],
    write: Callable[[Any, Note], None],
    *,
    cut: Callable[[Item], Iterable[Any]] | None = None,
    depth: int = DEPTH,
) -> None:
    """Pull `source` in one thread, call `generate` here, and `write` each result in order in another thread.

    With `cut`, items of `source` are cut into batches here, each as late as possible: after the previous batch was
    generated, which decides the size of the next.

    `generate` returns the future of a WorkerPool and a note, which `write` gets with the future's result, or None for
    an item without output. If any stage fails, and on Ctrl-C, all results that were generated before are written first
    (except if writing itself failed); then the error is raised. A second Ctrl-C ends the run at once.
    """
    inputs: Channel[Item] = Channel(depth)
    outputs: Channel[tuple[Future[Any], Note]] = Channel(depth)
    writing_failed: list[BaseException] = []

    def read() -> None:
        try:
            for item in source:
                inputs.put(item)
        except Cancelled:
            return
        except BaseException as error:  # raised again in the calling thread
            inputs.finish(error)
        else:
            inputs.finish()

    def drain() -> None:
        try:
            for future, note in outputs:
                write(future.result(), note)
        except Cancelled:
            return
        except BaseException as error:  # raised again in the calling thread
            writing_failed.append(error)
            outputs.cancel()
            inputs.cancel()

    reader = threading.Thread(target=read, name="fastgen-read", daemon=True)
    writer = threading.Thread(target=drain, name="fastgen-write", daemon=True)
    reader.start()
    writer.start()
    try:
        for batch in inputs if cut is None else chain.from_iterable(map(cut, inputs)):
            output = generate(batch)
            if output is not None:
                outputs.put(output)
    except Cancelled:
        pass  # the writer's error tells why
    finally:
        inputs.cancel()
        outputs.finish()
        try:
            writer.join()
        except KeyboardInterrupt:
            outputs.cancel()
            raise
        # An iterator that blocks can't be interrupted; its thread is a daemon.
        reader.join(timeout=1)
        if writing_failed:
            raise writing_failed[0]
