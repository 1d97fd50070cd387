"""What the tests of both hosts need: settings for a block, and jobs that run at once."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fastgen


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[None]:
    before = dataclasses.asdict(fastgen.configure())  # not `current`, which has what a block says too
    fastgen.configure(**options)
    try:
        yield
    finally:
        fastgen.configure(**before)


def run_together(jobs: list[Callable[[], None]], rounds: int) -> None:
    """Each job `rounds` times in a thread of its own, all starting at once; the first error is raised here."""
    barrier, errors = threading.Barrier(len(jobs)), []

    def work(job: Callable[[], None]) -> None:
        try:
            barrier.wait()
            for _ in range(rounds):
                job()
        except BaseException as error:  # to be raised in the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
