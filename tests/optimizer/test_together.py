"""Calls that run in turn: order, errors, random numbers, what a thread has of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastgen.optimizer import together

CPU = torch.device("cpu")


def run(calls: list[Callable[[], Any]], size: int = 2, answer: Any = None) -> dict[int, Any]:
    """Results, or the errors, by number."""
    ended: dict[int, Any] = {}

    def done(number: int, result: Any, error: Exception | None) -> None:
        assert number not in ended and not together.is_inside()
        ended[number] = result if error is None else error

    together.run(calls, size, answer or (lambda needs: {number: 2 * what for number, what in needs.items()}), done, CPU)
    return ended


def test_steps_are_shared() -> None:
    sizes: list[int] = []

    def answer(needs: dict[int, int]) -> dict[int, int]:
        sizes.append(len(needs))
        return {number: 10 * what for number, what in needs.items()}

    def call(steps: int) -> list[int]:
        assert together.is_inside()
        return [together.need(step) for step in range(steps)]

    found = run([lambda steps=steps: call(steps) for steps in (3, 1, 0, 2, 4)], 2, answer)
    assert found == {n: [10 * i for i in range(steps)] for n, steps in enumerate((3, 1, 0, 2, 4))}
    assert sizes == [2, 2, 2, 1, 1, 1, 1], "the third needs nothing, and makes room at once"
    assert not together.is_inside()


def test_outside() -> None:
    """In the thread that calls `run`, at once; elsewhere, too."""
    here = threading.get_ident()
    assert run([lambda: (together.outside(threading.get_ident), threading.get_ident())])[0][0] == here
    assert run([threading.get_ident])[0] != here
    assert together.outside(threading.get_ident) == here

    def fails() -> str:
        try:
            together.outside(int, "no number")
        except ValueError as error:
            return str(error)
        return ""

    assert "no number" in run([fails])[0]


def test_errors_end_one_call() -> None:
    class Own(Exception):
        pass

    def failing(error: Exception) -> None:
        together.need(1)
        raise error

    errors = [Own(), StopIteration(3), RuntimeError()]
    found = run([*(lambda error=error: failing(error) for error in errors), lambda: together.need(4)])
    assert [found[number] for number in range(3)] == errors and found[3] == 8


def test_an_error_of_the_step_is_raised_in_each_call() -> None:
    attempts: list[int] = []

    def answer(needs: dict[int, int]) -> dict[int, int]:
        attempts.append(len(needs))
        if len(attempts) == 1:
            raise MemoryError("full")
        return needs

    def tries_again() -> int:
        try:
            return together.need(1)
        except MemoryError:
            return together.need(5)

    found = run([tries_again, lambda: together.need(2)], 2, answer)
    assert found[0] == 5 and isinstance(found[1], MemoryError) and attempts == [2, 1]


@pytest.mark.parametrize("where", ["call", "answer", "outside"])
def test_an_interrupt_ends_all(where: str) -> None:
    """Whatever a call holds is freed, and no thread stays."""
    freed: list[int] = []
    before = threading.active_count()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    def call(number: int) -> None:
        try:
            together.need(1)
            if number == 1 and where != "answer":
                together.outside(interrupt) if where == "outside" else interrupt()
            together.need(2)
        finally:
            freed.append(number)

    answer = interrupt if where == "answer" else None
    with pytest.raises(KeyboardInterrupt):
        run([lambda number=number: call(number) for number in range(3)], 3, answer)
    assert sorted(freed) == [0, 1, 2] and threading.active_count() == before


def test_each_draws_as_if_it_were_the_first() -> None:
    def call(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(float(torch.rand(())))
            together.need(1)
        return found

    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(4)]
    torch.manual_seed(5)
    assert run([lambda: call(4), lambda: call(2), lambda: call(3)]) == {0: expected, 1: expected[:2], 2: expected[:3]}
    assert float(torch.rand(())) == expected[0], "the generator is as it was"


def test_numbers_of_others_are_not_drawn_again() -> None:
    """Calls that draw nothing leave the generator alone."""
    drawn: list[float] = []

    def answer(needs: dict[int, int]) -> dict[int, int]:
        drawn.append(float(torch.rand(())))
        return needs

    run([lambda: [together.need(1) for _ in range(3)]], 1, answer)
    assert len(set(drawn)) == 3


def test_a_run_inside_a_run() -> None:
    """The inner calls follow one another."""
    threads, found = torch.get_num_threads(), []

    def inner() -> None:
        together.run([lambda: 5, lambda: together.need(4)], 2, dict, lambda *ended: found.append(ended), CPU)

    run([inner])
    assert found == [(0, 5, None), (1, 8, None)] and torch.get_num_threads() == threads


def test_what_a_thread_has_of_its_own() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = lambda: (variable.get(), torch.is_inference_mode_enabled(), torch.get_num_threads())  # noqa: E731
        assert run([inside])[0] == (7, False, 1), "one thread each: more would cost the others"
        with torch.inference_mode():
            assert run([inside])[0][:2] == (7, True)
        assert torch.get_num_threads() == 2
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [2], "a thread of the user's has as many as before"
    finally:
        torch.set_num_threads(threads)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Mode(), torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_the_callers_thread(mode: Any) -> None:
    """Another thread would not have them: calls follow one another, in this one."""
    here = threading.get_ident()
    with mode:
        assert run([threading.get_ident, lambda: 1 // 0])[0] == here
        assert not run([together.is_inside])[0]
