"""Processes that are forked while other threads generate, and locks that the garbage collector has taken twice."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

import fastgen
from fastgen import config, locks
from fastgen.optimizer.suspending import Suspendable

FORKED = """
import os, signal, threading, sys
import torch, fastgen, zoo
from fastgen import locks
from fastgen.patching import redirection

torch.set_num_threads(1)
model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2", batch=1)
options = dict(num_beams=2, max_new_tokens=6)
model.generate(**inputs, **options)
own = torch.nn.Linear.forward
held, ended = threading.Event(), threading.Event()

def hold():
    "As a thread that is in the middle of everything."
    with redirection.redirected({(torch.nn.Linear, "forward"): lambda forward: lambda *args: forward(*args)}):
        taken = list(locks._all)
        for one in taken:
            one.acquire()
        held.set()
        ended.wait()
        for one in taken:
            one.release()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
assert len(locks._all) > 15 and torch.nn.Linear.forward is not own
child = os.fork()
if child == 0:
    signal.alarm(60)
    model.generate(**inputs, **options)
    assert list(fastgen.stream(model, **inputs, **options))
    with fastgen.configured(strict=True):
        model.generate(**inputs, **options)
    os._exit(0 if torch.nn.Linear.forward is own else 3)
_, status = os.waitpid(child, 0)
ended.set()
thread.join()
model.generate(**inputs, **options)
assert torch.nn.Linear.forward is own
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_is_forked_while_another_thread_generates() -> None:
    pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_lock_of_the_thread_that_forks_stays_taken() -> None:
    lock = locks.reentrant_lock()
    with lock:
        child = os.fork()
        if child == 0:
            taken: list[bool] = []
            other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
            other.start()
            other.join()
            os._exit(int(taken != [False]))
        assert os.waitpid(child, 0)[1] == 0


def test_a_block_that_ends_while_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the garbage collector ends a generator in which a block is open."""

    def settings() -> object:
        with fastgen.configured(history=5):
            yield  # type: ignore[misc]

    block = settings()
    next(block)  # type: ignore[call-overload]
    left, replace = [block], config.replace
    del block

    def replaced(*args: object, **options: object) -> object:
        left.clear()
        gc.collect()
        return replace(*args, **options)  # type: ignore[type-var]

    monkeypatch.setattr(config, "replace", replaced)
    before = config.current().history
    done = threading.Thread(target=lambda: fastgen.configure(history=7), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive() and not config._blocks
    monkeypatch.undo()
    fastgen.configure(history=before)


def test_a_call_that_ends_in_a_thread_that_holds_what_it_needs() -> None:
    """As where the garbage collector ends a stream."""
    held, has_ended = locks.lock(), threading.Event()

    def function() -> None:
        try:
            call.ask("anything")
        finally:
            with held:
                has_ended.set()

    call = Suspendable(function)
    assert call.resume() == "anything"
    with held:
        call.close()
        assert call.ended and not has_ended.is_set()
    assert has_ended.wait(20)


def test_a_cached_property_is_computed_once() -> None:
    class Holder:
        count = 0

        @locks.cached_property
        def value(self) -> int:
            """What it is."""
            self.count += 1
            return self.count

    holder = Holder()
    assert (holder.value, holder.value, holder.count) == (1, 1, 1) and Holder.value.__doc__ == "What it is."
