"""Runs that are killed with SIGKILL at random points. Forked: only the first import of the hosts has to be paid."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

PAUSE = 0.04  # what the runs are slowed down by at each batch, so that there is something to interrupt


def _child(run: Callable[[], int]) -> None:
    """Run with one thread: after a fork OpenMP's other threads are gone, and shared work would wait for them."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts start what runs beside them deaf to it
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os._exit(run())


def kill_at_random(run: Callable[[], int], journal: Path, kills: int, seed: int) -> int:
    """Start `run` up to `kills` times and kill it at or some time after its next batch; how often it was killed."""
    chance = random.Random(seed)
    for count in range(kills):
        before = _lines(journal)
        process = multiprocessing.get_context("fork").Process(target=_child, args=(run,))
        process.start()
        while process.is_alive() and _lines(journal) <= max(before, 1):
            time.sleep(0.001)
        time.sleep(chance.random() * 2 * PAUSE)
        if not process.is_alive():
            process.join()
            assert process.exitcode == 0
            return count
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return kills


def second_run(run: Callable[[], int]) -> int | None:
    """The exit code of `run` in another process."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(run,))
    process.start()
    process.join(timeout=60)
    return process.exitcode


def interrupt(run: Callable[[], int], journal: Path, number: signal.Signals) -> int | None:
    """Start `run`, send it this signal after its second batch; the exit code."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(run,))
    process.start()
    while process.is_alive() and _lines(journal) < 3:
        time.sleep(0.001)
    os.kill(process.pid or 0, number)
    process.join(timeout=60)
    return process.exitcode


def batches(journal: Path) -> int:
    return _lines(journal) - 1


def _lines(journal: Path) -> int:
    """Batches in the journal, and its header."""
    return journal.read_bytes().count(b"\n") if journal.exists() else 0
