"""A recorded step, replayed, gives what the model itself gives for other inputs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="tapes record torch's operators")

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastgen.replay.replayer import Captured
from fastgen.replay.tape import Drawing, Noting, Tape

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def without_gradients(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    with request.param():
        yield


def recorded(function: Callable[[], Any]) -> Tape:
    tape = Tape()
    tape.capture(function, CPU)
    return tape


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_inputs_and_weights(name: str) -> None:
    model = MODELS[name]().eval()
    inputs = [torch.randn(3, 5, 8) for _ in range({"decoder": 2, "attention": 3}.get(name, 1))]
    tape = Tape()
    torch.testing.assert_close(tape.capture(lambda: model(*inputs), CPU), model(*inputs))
    for tensor in (*inputs, *model.parameters()):
        tensor.copy_(torch.randn_like(tensor))
        torch.testing.assert_close(tape.replay(), model(*inputs))


def test_state() -> None:
    """What a step writes to stays where it is, and is noted."""
    count, slots, rows = torch.zeros((), dtype=torch.int64), torch.zeros(3, 2), torch.ones(1, 2)

    def step() -> Tensor:
        slots.index_copy_(0, count.view(1), rows)
        slots[0, 1:].mul_(2)
        return (slots.sum() + count.add_(1)).clone()

    tape = Tape()
    results = [float(tape.capture(step, CPU)), float(tape.replay()), float(tape.replay())]
    assert results == [4, 9, 16] and slots.tolist() == [[1, 8], [1, 1], [1, 1]]
    assert {each.data_ptr() for each in tape.written} == {slots.data_ptr(), slots.data_ptr() + 4, count.data_ptr()}


def test_views_lists_and_numbers() -> None:
    rows = torch.randn(4, 6)

    def step() -> dict[str, Any]:
        left, right = (rows * 2).chunk(2, 1)
        left.add_(torch.tensor(2.0).add_(rows.sum()))  # of a number, made anew each time
        joined = torch.cat([right, left.t().reshape(4, 3)], 1)
        joined[1:, ::2] = 0
        return {"joined": joined, "parts": (joined[0], [None, 7, "seven"]), "rows": rows}

    tape = recorded(step)
    rows.copy_(torch.randn(4, 6))
    for _ in range(2):
        torch.testing.assert_close(tape.replay()["joined"], step()["joined"])
        torch.testing.assert_close(tape.replay()["parts"][0], step()["parts"][0])
        assert tape.replay()["parts"][1] == [None, 7, "seven"] and tape.replay()["rows"] is rows


def test_random_numbers() -> None:
    rows = torch.rand(5, 7)
    model = nn.Sequential(nn.Dropout(0.5), nn.Softmax(-1)).train()
    tape = recorded(lambda: torch.multinomial(model(rows), 3))
    torch.manual_seed(1)
    expected = torch.multinomial(model(rows), 3)
    torch.manual_seed(1)
    assert tape.replay().equal(expected) and not tape.replay().equal(expected)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda rows: rows.sum().item(),
    "if": lambda rows: rows if rows.sum() > 0 else -rows,
    "list": lambda rows: rows.tolist(),
    "numpy": lambda rows: rows.detach().numpy(),
    "tensor": lambda rows: torch.tensor([rows[0], rows[1]]),
    "nonzero": lambda rows: rows.nonzero(),
    "by a mask": lambda rows: rows[rows > 0],
    "equal": lambda rows: rows.equal(rows + 1),
    "repeated": lambda rows: rows.repeat_interleave(rows.long()),
}


@pytest.mark.parametrize("read", READERS.values(), ids=list(READERS))
def test_who_reads_values_is_refused(read: Callable[[Tensor], Any]) -> None:
    """What was drawn before will be drawn again."""
    rows, state = torch.ones(3), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="waits for a value"):
        recorded(lambda: read(rows + torch.rand(3)))
    assert torch.get_rng_state().equal(state)


def test_noting() -> None:
    state, rows = torch.zeros(3), torch.ones(3)
    with Noting() as noting:
        state[1:].add_(rows[1:])
        (rows * 2).add_(1)
        assert noting.waits is None and [each.data_ptr() for each in noting.written] == [state.data_ptr() + 4]
        rows.nonzero()
    assert noting.waits == "aten.nonzero.default"


def test_memory_goes_with_the_tape() -> None:
    weight = torch.randn(4, 4)
    held, tape = StorageWeakRef(weight.untyped_storage()), Tape()
    tape.capture(lambda weight=weight: torch.ones(2, 4) @ weight, CPU)
    del weight
    gc.collect()
    assert not held.expired()
    gc.disable()
    try:
        del tape
        assert held.expired()
    finally:
        gc.enable()


QUERIES = torch.rand(3, 1, 2, 4, 8)
DRAWS: dict[str, tuple[Callable[[], Any], bool]] = {
    "rand": (lambda: torch.rand([]), True),
    "multinomial": (lambda: torch.multinomial(torch.ones(4), 2), True),
    "dropout": (lambda: nn.functional.dropout(torch.ones(4), 0.5, training=True), True),
    "dropout in evaluation": (lambda: nn.functional.dropout(torch.ones(4), 0.5, training=False), False),
    "attention": (lambda: nn.functional.scaled_dot_product_attention(*QUERIES), False),
    "attention with dropout": (lambda: nn.functional.scaled_dot_product_attention(*QUERIES, dropout_p=0.5), True),
    "product": (lambda: nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)), False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_who_draws(name: str) -> None:
    function, draws = DRAWS[name]
    assert recorded(function).draws is draws
    with Drawing() as drawing:
        function()
    assert drawing.draws is draws


def test_the_proof_of_a_step_leaves_other_threads_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.rand(3)
    captured = Captured((), [rows], [rows])
    captured.capture(Tape(), lambda leaves: leaves[0] * 2, CPU)
    replay, drawn = captured._recording.replay, []

    def replayed() -> Any:
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(2)))
        thread.start()
        thread.join()
        return replay()

    monkeypatch.setattr(captured._recording, "replay", replayed)
    torch.manual_seed(0)
    assert captured.verify(lambda: rows * 2, [rows], CPU)[1] is None
    drawn.append(torch.rand(2))
    torch.manual_seed(0)
    assert torch.cat(drawn).equal(torch.cat([torch.rand(2), torch.rand(2)]))
