"""Automatic batch sizes and back-off when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.memory.limits import is_out_of_memory
from fastgen.pipeline import batching
from fastgen.pipeline.batching import AutoBatch, run_with_backoff


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory of it"), OSError(28)])
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_this_torch_still_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@given(st.integers(1, 200), st.integers(1, 50))
def test_backoff_loses_and_repeats_nothing(count: int, room: int) -> None:
    ran: list[int] = []

    def run(units: Sequence[int]) -> list[int]:
        if len(units) > room:
            raise MemoryError
        ran.extend(units)
        return [10 * unit for unit in units]

    with mock.patch.object(batching, "release_memory"):  # a garbage collection each time, and there are thousands
        assert run_with_backoff(range(count), run) == [10 * unit for unit in range(count)]
    assert ran == list(range(count))


def test_a_single_unit_that_does_not_fit_is_an_error() -> None:
    def run(units: Sequence[int]) -> list[int]:
        if 3 in units:
            raise MemoryError
        return list(units)

    with pytest.raises(MemoryError):
        run_with_backoff(range(8), run)


def test_other_errors_pass_through() -> None:
    def run(units: Sequence[int]) -> list[int]:
        raise RuntimeError("shape mismatch")

    failures: list[int] = []
    with pytest.raises(RuntimeError, match="shape"):
        run_with_backoff(range(8), run, lambda units: failures.append(len(units)))
    assert not failures


def test_doubles_until_memory_runs_out_and_stays_below() -> None:
    auto, room, sizes = AutoBatch(8), 100, []
    for _ in range(12):
        sizes.append(auto.size)
        if auto.size > room:
            auto.failed(auto.size)
        else:
            auto.succeeded(auto.size, 1.0)
    assert sizes == [8, 16, 32, 64, 128, *[64] * 7]


def test_shrinks_again_when_memory_runs_out_later() -> None:
    auto = AutoBatch(8)
    auto.succeeded(8, 1.0)
    auto.failed(16)
    assert auto.size == 8
    auto.failed(8)
    assert auto.size == 4
    auto.succeeded(4, 9.0)
    assert auto.size == 4
    for _ in range(5):
        auto.failed(auto.size)
    assert auto.size == 1


def test_does_not_double_beyond_what_should_fit() -> None:
    auto = AutoBatch(8, fits=lambda: False)
    auto.succeeded(8, 1.0)
    assert auto.size == 8


def test_takes_back_a_doubling_that_is_slower() -> None:
    auto = AutoBatch(8, by_speed=True)
    for speed in (100.0, 150.0, 120.0, 900.0):
        auto.succeeded(auto.size, speed)
    assert auto.size == 16


def test_a_batch_that_was_not_full_says_nothing() -> None:
    auto = AutoBatch(8)
    auto.succeeded(3, 1.0)
    assert auto.size == 8


def test_the_first_size_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="start"):
        AutoBatch(0)
