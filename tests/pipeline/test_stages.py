"""The stages: order, overlap, bounds, and what is kept when one of them fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from fastgen.pipeline import WorkerPool, run_stages


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_results_are_written_in_the_order_of_the_input() -> None:
    written: list[Any] = []
    slow_first = "lambda task: (__import__('time').sleep(0.3 if task == 0 else 0), task)[1]"
    with WorkerPool(2, eval, slow_first) as pool:
        run_stages(range(20), lambda i: (pool.submit(i), -i), lambda *pair: written.append(pair))
    assert written == [(i, -i) for i in range(20)]


def test_batches_are_cut_after_the_batch_before_was_generated() -> None:
    sizes = [1]

    def cut(numbers: list[int]) -> Iterator[list[int]]:
        while numbers:
            batch, numbers = numbers[: sizes[-1]], numbers[sizes[-1] :]
            yield batch

    def generate(batch: list[int]) -> tuple[Future[list[int]], None]:
        sizes.append(2 * sizes[-1])
        return done(batch), None

    written: list[list[int]] = []
    run_stages([[1, 2, 3, 4], [5, 6, 7, 8, 9]], generate, lambda result, _: written.append(result), cut=cut)
    assert written == [[1], [2, 3], [4], [5, 6, 7, 8, 9]]


def test_items_without_output_are_skipped() -> None:
    written: list[int] = []
    run_stages(range(6), lambda i: (done(i), None) if i % 2 else None, lambda result, _: written.append(result))
    assert written == [1, 3, 5]


def test_reading_generating_and_writing_overlap() -> None:
    def source() -> Iterator[int]:
        for i in range(6):
            time.sleep(0.1)
            yield i

    def generate(i: int) -> tuple[Future[int], None]:
        time.sleep(0.1)
        return done(i), None

    started = time.monotonic()
    run_stages(source(), generate, lambda *_: time.sleep(0.1))
    assert time.monotonic() - started < 1.3  # 1.8 one after another, 0.8 overlapped


def test_reading_does_not_run_ahead_without_bound() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            read.append(i)
            yield i

    ahead: list[int] = []

    def generate(i: int) -> tuple[Future[int], None]:
        time.sleep(0.002)
        ahead.append(len(read) - i)
        return done(i), None

    run_stages(source(), generate, lambda *_: None, depth=3)
    assert max(ahead) <= 3 + 2  # in the channel, in the reader's hand, in ours


def test_writing_that_lags_holds_generation_back() -> None:
    generated: list[int] = []
    lead: list[int] = []

    def write(result: int, _: None) -> None:
        time.sleep(0.005)
        lead.append(len(generated) - result)

    run_stages(range(50), lambda i: (generated.append(i), (done(i), None))[1], write, depth=3)
    assert max(lead) <= 3 + 2


@pytest.mark.parametrize("stage", ["read", "generate"])
def test_what_was_generated_before_an_error_is_written(stage: str) -> None:
    def source() -> Iterator[int]:
        for i in range(10):
            if stage == "read" and i == 5:
                raise OSError("reading broke")
            yield i

    def generate(i: int) -> tuple[Future[int], None]:
        if stage == "generate" and i == 5:
            raise OSError("generating broke")
        return done(i), None

    written: list[int] = []
    with pytest.raises(OSError, match="broke"):
        run_stages(source(), generate, lambda result, _: written.append(result))
    assert written == [0, 1, 2, 3, 4]


def test_a_failed_task_ends_the_run_after_the_results_before_it() -> None:
    written: list[float] = []
    with WorkerPool(1, eval, "lambda task: 1 / (3 - task)") as pool, pytest.raises(RuntimeError, match="ZeroDivision"):
        run_stages(range(1000), lambda i: (pool.submit(i), None), lambda result, _: written.append(result))
    assert len(written) == 3


def test_an_error_in_writing_ends_the_run() -> None:
    generated: list[int] = []

    def write(result: int, _: None) -> None:
        if result == 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_stages(range(10_000), lambda i: (generated.append(i), (done(i), None))[1], write, depth=2)
    assert len(generated) < 20


def test_ctrl_c_keeps_what_was_generated() -> None:
    written: list[int] = []

    def generate(i: int) -> tuple[Future[int], None]:
        if i == 4:
            raise KeyboardInterrupt
        return done(i), None

    with pytest.raises(KeyboardInterrupt):
        run_stages(range(100), generate, lambda result, _: (time.sleep(0.05), written.append(result)))
    assert written == [0, 1, 2, 3]


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="x"):
        run_stages(iter(int, 1), lambda _: (_ for _ in ()).throw(ValueError("x")), lambda *_: None)
    assert threading.active_count() == before
