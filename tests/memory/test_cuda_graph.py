"""What a capture does around the function, with stand-ins for the device: the user's random state is never in use."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="graphs are torch's")

from fastgen.memory import cuda_graph, limits  # noqa: E402

DEVICE = torch.device("cuda", 0)


class Generator:
    """As torch's: a capture takes possession of the state that it begins with."""

    def __init__(self, state: Any = None) -> None:
        self.state = SimpleNamespace(is_captured=False) if state is None else state

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def clone_state(self) -> Generator:
        return Generator(SimpleNamespace(is_captured=self.state.is_captured))


class Graph:
    def __init__(self, generator: Generator, fails: bool = False) -> None:
        self._generator, self._fails, self.events = generator, fails, []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if self._fails:
            raise RuntimeError("another capture is under way")
        self._generator.state.is_captured = True
        self.events.append("begin")

    def capture_end(self) -> None:
        self.events.append("end")


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    found = Generator()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graph, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (found,))
    return found


@pytest.mark.parametrize("device", [DEVICE, torch.device("cuda")], ids=str)
def test_others_may_draw_meanwhile(generator: Generator, device: Any) -> None:
    own, graph = generator.state, Graph(generator)

    def function() -> str:
        assert generator.state is own and not own.is_captured
        return "result"

    assert cuda_graph.capture(graph, function, device) == "result"
    assert graph.events == ["begin", "end"] and generator.state is own and not own.is_captured


def test_what_fails_leaves_all_as_it_was(generator: Generator) -> None:
    own = generator.state

    def function() -> None:
        raise RuntimeError("a wait for the device")

    for graph, events in ((Graph(generator), ["begin", "end"]), (Graph(generator, fails=True), [])):
        with pytest.raises(RuntimeError):
            cuda_graph.capture(graph, function, DEVICE)
        assert graph.events == events and generator.state is own and not own.is_captured
    assert cuda_graph.capture(Graph(generator), lambda: 7, DEVICE) == 7, "the next one may begin"


def test_one_at_a_time(generator: Generator) -> None:
    running: list[int] = []

    def function() -> None:
        running.append(1)
        assert len(running) == 1
        running.pop()

    threads = [threading.Thread(target=cuda_graph.capture, args=(Graph(generator), function, DEVICE)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda_graph._streams) == 1


def test_want_of_memory_is_known_behind_the_end_of_a_capture(generator: Generator) -> None:
    """The end fails because the capture has failed: what counts is why."""

    class Failing(Graph):
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for function, expected in ((out_of_memory, True), (waits, False)):
        with pytest.raises(RuntimeError) as error:
            cuda_graph.capture(Failing(generator), function, DEVICE)
        assert "previous error" in str(error.value) and limits.is_out_of_memory(error.value) == expected
