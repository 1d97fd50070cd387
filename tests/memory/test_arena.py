"""Arenas: what a thread frees inside serves it again, and never while anybody refers to it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from racing import share_nothing

import fastgen
from fastgen import ops
from fastgen.memory import arena, limits
from fastgen.memory.arena import Arena

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not ops.has_runtime(), reason="there is no native library"),
]
LEAST = 2**17  # bytes: smaller ones are left to the C library


@pytest.fixture(autouse=True)
def _none_kept() -> Iterator[None]:
    arena.release()
    yield
    arena.release()


def taken(size: int = LEAST) -> torch.Tensor:
    return torch.empty(size // 4, device="cpu")


def test_memory_serves_again_once_nobody_refers_to_it() -> None:
    with Arena() as _, Arena():  # the innermost counts
        first = taken()
        address, part = first.data_ptr(), first[5:7]
        del first
        second = taken()
        assert second.data_ptr() != address, "a part of it is still in use"
        del part
        assert taken().data_ptr() == address


def test_sizes_that_differ_by_little_share_and_others_do_not() -> None:
    inside = Arena()
    with inside:
        del (large := [taken(16 * LEAST)])[:]
        assert inside.nbytes() == 16 * LEAST
        kept = taken(15 * LEAST)
        assert inside.nbytes() == 0, "it took the larger block"
        del kept, large
        kept = taken(7 * LEAST)
        assert inside.nbytes() == 16 * LEAST, "more than half would lie idle"
        del kept
        small = taken(LEAST - 4)
        del small
    assert inside.nbytes() == 23 * LEAST
    inside.trim()
    assert inside.nbytes() == 0


def test_growing_tensors_leave_no_trail() -> None:
    inside = Arena()
    with inside:
        for size in range(LEAST, 40 * LEAST, LEAST // 2):
            taken(size)
        assert inside.nbytes() <= 40 * LEAST
        kept = inside.nbytes()
        for _ in range(3):  # sizes that take turns keep their blocks
            taken(2 * LEAST), taken(39 * LEAST)
        assert inside.nbytes() <= kept + 2 * LEAST


def test_what_is_to_stay_lies_outside() -> None:
    model = torch.nn.Identity()
    with arena.of(model), arena.outside():
        taken()
        assert arena.nbytes() == 0
        with arena.of(model):
            taken()
    assert arena.nbytes() == LEAST
    assert isinstance(arena.of(torch.nn.Linear(2, 2, device="meta")), contextlib.nullcontext)


def test_nothing_changes_outside() -> None:
    inside, kept = Arena(), []
    taken()
    with pytest.raises(ZeroDivisionError), inside:
        1 / 0  # noqa: B018
    taken()
    thread = threading.Thread(target=lambda: kept.append(taken().numel()))
    with inside:
        thread.start()
        thread.join()
    assert kept and inside.nbytes() == 0


def test_tensors_outlive_their_arena() -> None:
    inside = Arena()
    with inside:
        tensor, other = taken().fill_(7.0), taken()
        del other
    del inside
    gc.collect()
    with Arena():
        del (others := [taken().fill_(1.0) for _ in range(9)])[:]
    assert bool((tensor == 7).all()) and not others


def test_resized_shared_and_cloned_tensors() -> None:
    with Arena():
        tensor = torch.ones(LEAST)
        grown = tensor.clone().resize_(3 * LEAST)
        assert grown.numel() == 3 * LEAST and bool((grown[:LEAST] == 1).all())
        shared = tensor.clone().share_memory_()
        numbers = tensor.numpy()
        del tensor
        torch.zeros(LEAST)
        assert numbers.min() == 1 and bool((shared == 1).all())


def test_threads_get_different_memory() -> None:
    inside = Arena()

    def take() -> torch.Tensor:
        with inside:
            return taken()

    assert share_nothing(take) and 0 < inside.nbytes() <= 16 * LEAST


def test_a_models_memory_goes_with_it_or_on_release_or_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    fastgen.release()  # what other tests have left
    for end in ("death", "release", "shortage", "plenty"):
        model = torch.nn.Identity()
        with arena.of(model), arena.of(model):
            taken()
        assert arena.nbytes() == LEAST == fastgen.status().buffer_bytes
        if end == "death":
            del model
            gc.collect()
        elif end == "release":
            fastgen.release()
        else:
            monkeypatch.setattr(limits, "free", lambda end=end: 4 * LEAST if end == "plenty" else LEAST)
            arena.settle()
        assert arena.nbytes() == (LEAST if end == "plenty" else 0), end


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_can_use_it() -> None:
    inside, stop = Arena(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with inside:
                taken()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                signal.alarm(20)  # rather than wait for ever
                try:
                    with inside:
                        taken()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_wrong_use() -> None:
    with pytest.raises(RuntimeError, match="is in no arena"):
        Arena().__exit__()
