"""What is wrapped for a while is put back however that ends."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import fastgen
from fastgen.patching import patch_set, redirection
from fastgen.patching.redirection import redirected

_FILES = {patch_set.__file__, redirection.__file__}


class Host:
    def one(self) -> str:
        return "one"

    def two(self) -> str:
        return "two"


def _wrap(function: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: f"wrapped {function(*args)}"


SEAMS = {(Host, "one"): _wrap, (Host, "two"): _wrap}


def _interrupted_at(number: int) -> bool:
    """Use the wrappers, interrupted at a line of ours; returns whether there are so many lines."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in _FILES:
            return None
        # A trace function raises where a `with` takes or leaves a lock, too; a signal does not.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        count += event == "line" and not line.startswith("with ")
        if count == number and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with redirected(SEAMS):
            assert Host().one() == "wrapped one"
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("how", ["another block", "disable"])
def test_an_interrupt_at_any_line(how: str) -> None:
    own = Host.one, Host.two
    number = 1
    while _interrupted_at(number):
        if how == "disable":
            with fastgen.disabled():
                assert (Host.one, Host.two) == own, number
        else:
            with redirected({(Host, "one"): _wrap}):
                assert Host().one() == "wrapped one"
        assert (Host.one, Host.two) == own, number
        number += 1
    assert number > 30 and (Host.one, Host.two) == own and not redirection._redirections


def test_blocks_of_several_threads() -> None:
    own, inside, go_on = Host.one, threading.Event(), threading.Event()

    def other() -> None:
        with redirected(SEAMS):
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=other)
    with redirected(SEAMS):
        thread.start()
        inside.wait(30)
    assert Host().one() == "wrapped one"  # for the other thread
    go_on.set()
    thread.join()
    assert Host.one is own
