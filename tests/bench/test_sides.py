"""What becomes of a task when sides change their outputs, die, hang or are not there: the others go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_side import NAMES, TASK, Fake

from fastgen.bench import child, measure, run
from fastgen.bench.child import Changed, Child
from fastgen.bench.measure import Settings
from fastgen.bench.runners import Missing, Refused
from fastgen.bench.worker import Peak, Worker


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    def take(**troubles: Exception) -> Any:
        """`troubles`: by side__question."""
        found = {(name.split("__")[0], name.split("__")[1].replace("_", " ")): e for name, e in troubles.items()}
        monkeypatch.setattr(measure, "Child", type("OfTest", (Fake,), {"troubles": found}))
        monkeypatch.setattr(measure, "PAUSE", 0)
        result, _ = measure.run(TASK, Settings(rounds=3), ["phases"], lambda what: None)
        return result

    return take


def timed(result: Any) -> list[list[str]]:
    return [list(one["seconds"]) for one in result["rounds"]]


def test_all_is_well(measured: Any) -> None:
    result = measured()
    names = list(NAMES)
    assert timed(result) == [names, [*names[1:], names[0]], [names[2], *names[:2]]]
    assert result["sides"]["fastgen"]["ratio"]["median"] == 1 and result["sides"]["fastgen"]["phases"]["encoder"] == 1


@pytest.mark.parametrize("turn", [0, 2])
def test_outputs_of_timed_calls_that_change_are_wrong(measured: Any, turn: int) -> None:
    result = measured(**{f"fastgen__turn_{turn}": Changed([0])})
    ours = result["sides"]["fastgen"]
    assert ours["verified"]["different"] == [0] and "ratio" not in ours and "seconds" not in ours
    assert "ratio" in result["sides"]["ctranslate2"]
    assert run.is_wrong({"tasks": [result]}) == ["t: 1 of 1 outputs of fastgen differ from transformers's"]  # type: ignore[typeddict-item]


def test_a_peer_that_dies_in_a_round_leaves_the_others(measured: Any) -> None:
    result = measured(ctranslate2__turn_2=Refused("its process died"))
    assert result["sides"]["ctranslate2"]["refused"] == "its process died"
    assert "ratio" not in result["sides"]["ctranslate2"] and "ratio" in result["sides"]["fastgen"]
    assert [len(one) for one in timed(result)] == [3, 2, 2]
    assert not run.is_wrong({"tasks": [result]})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("question", ["phases", "turn_1"])
def test_fastgen_that_dies_is_wrong(measured: Any, question: str) -> None:
    result = measured(**{f"fastgen__{question}": Refused("its process died")})
    assert run.is_wrong({"tasks": [result]}) == ["t: fastgen could not do it: its process died"]  # type: ignore[typeddict-item]


def test_without_stock_nothing_of_ours_is_timed(measured: Any) -> None:
    result = measured(transformers__first=Refused("out of memory"))
    assert result["rounds"] == []
    assert result["sides"]["fastgen"]["refused"] == "there is nothing to compare it with: transformers did not run"


def test_what_is_not_installed_is_no_fault(measured: Any) -> None:
    result = measured(convert__load=Missing("CTranslate2 is not installed"))
    assert result["sides"]["ctranslate2"] == {"refused": "CTranslate2 is not installed", "missing": True}
    result = measured(transformers__load=Missing("no"), fastgen__load=Missing("no"))
    assert not run.is_wrong({"tasks": [result]})  # type: ignore[typeddict-item]


# ---------------------------------------------------------------------------------------------- the process itself
class Runner:
    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = iter(outputs)

    def generate(self) -> Any:
        return next(self._outputs)

    def outputs(self, generated: Any) -> dict[str, Any]:
        return {"tokens": generated}


def worker(runner: Any) -> Worker:
    found = Worker.__new__(Worker)
    found.order, found.runner = {"device": "cpu", "ours": False}, runner
    return found


def test_a_turn_tells_which_outputs_changed() -> None:
    found = worker(Runner([[[5], [6]], [[5], [6]], [[0], [6]]]))
    found.first()
    assert found.turn(1)["changed"] == [] and found.turn(1)["changed"] == [0]


def test_of_a_side_that_draws_anew_lengths_are_compared() -> None:
    runner: Any = Runner([[[5, 6]], [[7, 8]], [[7]]])
    runner.draws_anew = True
    found = worker(runner)
    found.first()
    assert found.turn(1)["changed"] == [] and found.turn(1)["changed"] == [0]


def test_memory_on_a_gpu_is_unknown_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with Peak("cuda") as peak:
        pass
    assert peak.bytes is None


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    monkeypatch.setattr(child, "_TO_END", 0.2)
    monkeypatch.setattr(child, "_TO_ANSWER", 0.5)
    task = TASK.as_dict()
    order = {"runner": "ngrams", "options": {}, "task": task, "threads": 1, "device": "cpu", "ours": False}
    stopped = Child(order, {"FASTGEN_DISABLE": "1"})
    stopped._process.send_signal(signal.SIGSTOP)
    with pytest.raises(Refused, match="its process died with exit status -9"):
        stopped.load()
    stopped.close()

    stopped = Child(order, {"FASTGEN_DISABLE": "1"})
    stopped._process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    stopped.close()
    assert stopped._process.returncode == -9 and time.monotonic() - started < 30
