"""Threads that take memory at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

THREADS = 8


def share_nothing(take: Callable[[], torch.Tensor]) -> bool:
    """Whether what each of the threads takes, again and again, keeps the number that it writes there."""
    start, failed = threading.Barrier(THREADS), []

    def work(number: int) -> None:
        start.wait()
        for _ in range(200):
            tensor = take().fill_(number)
            if not bool((tensor == number).all()):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not failed
