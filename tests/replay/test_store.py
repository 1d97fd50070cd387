"""What a call has recorded, later calls replay: the results are the model's own, and what does not fit is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="steps are recorded with torch")

import torch
from naive_cache import HEADS, SIZE, Prompt, attend, random_parents
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen.cache.tree import BeamTree
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits
from fastgen.replay import store
from fastgen.replay.guards import Host, ModelGuards
from fastgen.replay.recorded_call import RecordedCall
from fastgen.replay.replayer import Replayer

CPU = torch.device("cpu")
BEAMS = 2
HOST = Host(packages=(__name__.partition(".")[0],), configs=())


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    store.release()
    yield
    store.release()


class Decoder(nn.Module):
    """One layer of attention over a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(11, 8), nn.Linear(HEADS * SIZE, 11)
        self.query, self.key, self.value = (nn.Linear(8, HEADS * SIZE) for _ in range(3))

    def forward(self, tokens: Tensor, tree: BeamTree) -> Tensor:
        rows, layer = self.embed(tokens), tree.layers[0]
        query, *new = (each(rows).view(-1, HEADS, 1, SIZE) for each in (self.query, self.key, self.value))
        return self.output(attend(tree, layer, query, *layer.append(*new)).flatten(1))


class State:
    """The tree, and nothing else."""

    def __init__(self, tree: BeamTree) -> None:
        self.tree, self.products = tree, LinearDispatcher("off")
        self.restore_first_buffers, self.close = tree.restore_first_buffers, tree.close

    def fill(self, other: State) -> None:
        self.tree.reset_from(other.tree)

    def shape(self) -> Any:
        return self.tree.batch, self.tree.capacity, self.tree.prompt_length

    def nbytes(self) -> int:
        return self.tree.retained_bytes


def steps(tree: BeamTree, run: Callable[[Tensor], Tensor], seed: int, count: int) -> list[Tensor]:
    """The logits of each step, in which beams go on with their best tokens."""
    torch.manual_seed(seed)
    tokens, found = torch.zeros(tree.batch * BEAMS, dtype=torch.int64), []
    for _ in range(count):
        tree.advance()
        found.append(run(tokens).clone())
        parents = random_parents(tree.batch, BEAMS)
        tokens = found[-1].argmax(-1).index_select(0, parents)
        tree.reorder(parents)
    return found


@torch.no_grad()
def decode(model: nn.Module, seed: int, count: int = 12, batch: int = 2, how: Any = None) -> tuple[int, int]:
    """How many steps a call captures and replays, whose logits must be those of the model alone."""
    torch.manual_seed(seed)
    prompt = Prompt(batch, 3, padded=True)
    plain, state, replayer = prompt.tree(BEAMS, count), State(prompt.tree(BEAMS, count, True)), Replayer(CPU)
    expected = steps(plain, lambda tokens: model(tokens, plain), seed, count)
    call = RecordedCall(model, replayer, CPU)
    state = call.reuse(state, how) or state
    tree = state.tree
    call.retain_buffers(tree)
    found = steps(tree, lambda tokens: replayer(lambda its: model(its, tree), tokens, tree.epoch), seed, count)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    call.store(tree, state, how, lambda: ModelGuards(model.modules(), HOST))
    return replayer.counts.captures, replayer.counts.replays


def test_later_calls() -> None:
    """The first call runs a step by itself, records one and runs one beside its replay."""
    model = Decoder()
    assert [decode(model, seed) for seed in range(3)] == [(1, 12 - 3), (0, 12), (0, 12)]
    assert decode(model, 3, batch=3) == decode(model, 4, how="otherwise") == (1, 12 - 3)
    assert decode(model, 5) == (0, 12) and store.count(model) == 3


def test_later_calls_that_grow() -> None:
    """What is captured in larger buffers is there for the next call, which comes to them at the same step."""
    model = Decoder()
    (first, _), second = decode(model, 0, 130), decode(model, 0, 130)
    assert first == 2 and second == (0, 130)


def test_how_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of four kinds of calls, the oldest goes first; none that take more than a fourth of the memory."""
    model = Decoder()
    for kind in (0, 1, 2, 3, 0, 4):
        decode(model, 0, how=kind)
    assert store.count(model) == 4 and [decode(model, 0, how=kind)[0] for kind in (2, 0)] == [0, 0]
    assert decode(model, 0, how=1)[0] == 1
    size = store.nbytes(model)
    monkeypatch.setattr(limits, "free", lambda: 3 * size)
    assert store.may_keep(0, CPU) and not store.may_keep(1, CPU)
    monkeypatch.setattr(limits, "free", lambda: 0)
    decode(model, 0)
    assert store.count(model) == store.nbytes() == 0


def test_surroundings() -> None:
    before = store.surroundings(CPU)
    assert store.surroundings(CPU) == before is not None
    with torch.inference_mode():
        assert store.surroundings(CPU) != before
    with TorchFunctionMode():
        assert store.surroundings(CPU) is None
    known = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert store.surroundings(CPU) != before
    finally:
        torch.set_float32_matmul_precision(known)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda model: setattr(model.query, "weight", nn.Parameter(torch.randn_like(model.query.weight))),
    "values": lambda model: model.load_state_dict(Decoder().state_dict()),
    "layer": lambda model: setattr(model, "output", nn.Linear(HEADS * SIZE, 11, bias=False)),
    "mode": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_calls_after_a_change(change: Callable[[Any], Any]) -> None:
    model = Decoder()
    decode(model, 0)
    change(model)
    assert [decode(model, seed) for seed in (1, 2)] == [(1, 12 - 3), (0, 12)] and store.count(model) == 1
    model.output.register_forward_hook(lambda module, inputs, output: output + 1)
    assert decode(model, 3) == (1, 12 - 3) and store.count(model) == 0, "whatever a hook does is not seen"


def test_the_model_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, closed = Decoder(), []
    monkeypatch.setattr(BeamTree, "close", lambda tree: closed.append(tree.nbytes))
    decode(model, 0)
    held = [weakref.ref(each) for each in (model, *model.parameters())]
    assert store.nbytes() > 0 and not closed
    del model
    gc.collect()
    assert [each() for each in held] == [None] * len(held) and store.nbytes() == 0 < sum(closed)
