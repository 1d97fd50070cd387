"""Recorded calls, run natively and as Python: the same results, and the same errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastgen import ops
from fastgen.memory.peak import PeakMemory
from fastgen.replay import program
from fastgen.replay.replayer import Replayer
from fastgen.replay.tape import Tape

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(program, "native", lambda steps, returned: None)
    elif not ops.has_runtime():
        pytest.skip("no native operators")
    return str(request.param)


def recorded(kind: str, step: Callable[[], Any]) -> Tape:
    tape = Tape()
    tape.capture(step, CPU)
    assert tape._function.__name__ == ("run" if kind == "native" else "replay")
    return tape


X, W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.randn(8, 6)
MASK = X > 0


def lists(x: Tensor) -> Any:
    a, b, c = x.split([1, 2, 3], -1)
    first, *_ = x.unbind(0)
    return torch.cat([c, a, b], -1), torch.stack([first, first]), x.chunk(2)[1]


STEPS: dict[str, Callable[[Tensor], Any]] = {
    "a number for a tensor": lambda x: (x * 0.5, 3 + x, x.to(torch.int64) * 2, x.to(torch.int64) * 0.5, x > 0),
    "an integer for a number": lambda x: (torch.add(x, x, alpha=2), x.pow(2), torch.softmax(x, -1), x.clamp(min=0)),
    "a dtype": lambda x: (x.double(), x.to(torch.bfloat16), torch.zeros_like(x, dtype=torch.int32), x.bool()),
    "a memory format": lambda x: (x.t().contiguous(), x.t().clone(memory_format=torch.contiguous_format)),
    "lists": lists,
    "a list of integers": lambda x: (x.mean((0, 1)), x.sum([0], keepdim=True), x.new_zeros([]), x.view(2, 2, 6)),
    "indices, some of them None": lambda x: (x[:, torch.tensor([2, 0])], x[torch.tensor([1, 1]), torch.tensor([0, 5])]),
    "several outputs": lambda x: (*torch.topk(x, 2), *x.max(-1), torch.sort(x)[1]),
    "an output that nobody reads": lambda x: torch.topk(x, 2)[1] + 1,
    "in place": lambda x: x.clone().mul_(2).add_(1).index_fill_(0, torch.tensor([1]), 0.0),
    "views": lambda x: x.t()[1:3].unsqueeze(0).expand(3, -1, -1).reshape(-1, 4).narrow(0, 1, 2),
    "a mask": lambda x: torch.where(MASK, x, torch.finfo(torch.float32).min).masked_fill(MASK, -1.0),
    "a linear layer": lambda x: torch.nn.functional.linear(x, W, torch.ones(8)),
    "an operator of fastgen's": lambda x: ops.skinny_linear(x, [W, W[:3]], None),
    "a string": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "constants among the results": lambda x: {"x": x + 1, "n": 3, "w": W, "none": None, "twice": [x * 2, X]},
    "nothing": lambda x: (W, 5),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_replay_is_the_step(kind: str, name: str) -> None:
    x = X.clone()
    tape = recorded(kind, lambda: STEPS[name](x))
    for seed in (1, 2):
        x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        expected, found = (torch.utils._pytree.tree_flatten(each) for each in (STEPS[name](x), tape.replay()))
        assert expected[1] == found[1]
        for one, other in zip(expected[0], found[0], strict=True):
            if isinstance(one, Tensor):
                assert one.dtype == other.dtype and one.stride() == other.stride()
                assert torch.equal(one, other)
            else:
                assert one is other or one == other


def test_an_error_is_the_operators(kind: str) -> None:
    x, index = X.clone(), torch.tensor([1])
    tape = recorded(kind, lambda: x.index_select(0, index) + 1)
    index.fill_(9)
    with pytest.raises(IndexError, match="out of range"):
        tape.replay()
    index.fill_(2)
    assert torch.equal(tape.replay(), X[2:3] + 1)


def test_a_constant_that_has_no_native_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("a constant of another kind")

    monkeypatch.setattr(program, "_add", refuse)
    assert torch.equal(recorded("python", lambda: X * 2).replay(), X * 2)


def test_what_no_later_call_reads_is_freed(kind: str) -> None:
    """A step of 200 calls on 4 MB each needs little more than the memory of two."""
    x = torch.ones(2**20)

    def step() -> Tensor:
        y = x
        for _ in range(200):
            y = y * 0.999
        return y

    tape = recorded(kind, step)
    gc.collect()
    with PeakMemory(CPU) as peak:
        tape.replay()
    if peak.bytes is None:
        pytest.skip("this system does not tell the peak of memory")
    assert peak.bytes < 20 * x.nbytes


def test_a_program_keeps_nothing_alive_once_it_is_gone(kind: str) -> None:
    class Held(torch.nn.Module):
        pass

    gc.disable()
    try:
        weight, holder = torch.randn(4, 6), Held()
        holder.weight = weight
        tape = recorded(kind, lambda weight=weight: X * weight)
        alive = StorageWeakRef(weight.untyped_storage())
        del weight, holder
        assert not alive.expired()
        del tape
        assert alive.expired()
    finally:
        gc.enable()


def test_threads_run_one_program_at_once(kind: str) -> None:
    tape = recorded(kind, lambda: (X @ W.t()).softmax(-1).cumsum(-1) * 2)
    expected, errors = tape.replay(), []

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(tape.replay(), expected):
                    errors.append("another result")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_runtime", lambda: False)
    assert torch.equal(recorded("python", lambda: X + 1).replay(), X + 1)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch._foreach_mul([x, x + 1], [2.0, 3.0]),
        lambda x: (torch._foreach_add_([x], 1.0), x + 1)[1],
        lambda x: (torch._assert_async(x.sum() < 1e9), x * 2)[1],
    ],
    ids=["a list of numbers", "no output, in place", "no output"],
)
def test_operators_that_are_rare(step: Callable[[Tensor], Any]) -> None:
    """They run natively or as Python; but they run."""
    x, own = X.clone(), X.clone()
    tape = Tape()
    tape.capture(lambda: step(x), CPU)
    x.copy_(X * 3)
    own.copy_(X * 3)
    expected, found = (torch.utils._pytree.tree_leaves(each) for each in (step(own), tape.replay()))
    assert all(map(torch.equal, expected, found)) and torch.equal(x, own)


def test_a_result_with_an_equality_of_its_own(kind: str) -> None:
    results = numpy.zeros(3), W
    tape = recorded(kind, lambda: (X + 1, *results))
    found = tape.replay()
    assert torch.equal(found[0], X + 1) and found[1] is results[0] and found[2] is W


@pytest.mark.native
def test_a_program_that_is_built_wrongly() -> None:
    if not ops.has_runtime():
        pytest.skip("no native operators")
    built = torch.classes.fastgen.Program()
    built.add_slot(3)
    with pytest.raises(ValueError, match="slot 3 is of no call so far"):
        built.add_call("aten::neg", "", [0], False, [])
    built = torch.classes.fastgen.Program()
    with pytest.raises(ValueError, match="has other arguments or outputs than were given"):
        built.add_call("aten::neg", "", [0], False, [])


def test_a_replay_that_fails_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay runs beside the step: if it raises, the step's result stands, and nothing is replayed."""
    calls = Replayer(CPU)
    x = X.clone()

    def step(inputs: Tensor) -> Tensor:
        x.add_(1)
        return x * inputs

    for count in range(1, 7):
        if count == 3:

            def failing() -> Any:
                x.zero_()
                raise TypeError("an argument of another type")

            (captured,) = calls.captured.values()
            monkeypatch.setattr(captured._recording, "replay", failing)
            with pytest.warns(RuntimeWarning, match="it fails: an argument of another type"):
                found = calls(step, W[0], None)
        else:
            found = calls(step, W[0], None)
        torch.testing.assert_close(found, (X + count) * W[0])
    assert calls.failure and not calls.captured
