"""The pool of actors, with workers that need no model: each block once, whoever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")

import ray

from fastgen.distributed import actors
from fastgen.distributed.actors import ATTEMPTS, PROGRESS, Told, results
from fastgen.distributed.blocks import Block
from fastgen.distributed.placement import Placement
from fastgen.pipeline.errors import WorkerError

pytestmark = pytest.mark.slow
BLOCKS = [Block(n, "/in.txt", "in.txt", "text", 10 * n, 10, 3, 3 * n, 0, None, "") for n in range(8)]

ERROR = ray.exceptions.RayActorError()


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    ray.init(log_to_driver=False)
    yield cluster
    ray.shutdown()


class Worker:
    """Takes a while for a block, and leaves a line in a file for each that it begins."""

    def __init__(self, folder: Path, dies: int = 0, fails: int = 0, bad: bool = False) -> None:
        for attempt in range(fails):
            with contextlib.suppress(FileExistsError):  # another actor failed here, perhaps at the same moment
                (folder / f"failed {attempt}").touch(exist_ok=False)
                raise ValueError("no model")
        self._folder, self._dies, self._told = folder, dies, (-1, 0, 0)
        able = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        self._bad = bad and self.node() == min(able)
        self._waits = bad and not self._bad  # for the deaths of the other, so that none comes too late
        (folder / "bad").touch()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group=PROGRESS)
    def told(self) -> tuple[int, int, int]:
        return self._told

    def generate(self, block: Block) -> tuple[int, int]:
        begun = self._folder / str(block.number)
        with begun.open("a") as file:
            file.write(f"{self.node()}\n")
        if self._bad:
            with (self._folder / "bad").open("a") as file:
                file.write("died\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if block.number == 2 and len(begun.read_text().splitlines()) <= self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if block.number == 5 and self._dies < 0:
            raise ZeroDivisionError("a bug")
        while self._waits and len((self._folder / "bad").read_text().splitlines()) < ATTEMPTS:
            time.sleep(0.1)
        self._told = block.number, block.count, 7
        time.sleep(1.2)
        return block.number, os.getpid()


def _results(folder: Path, actors: int = 2, told: Any = lambda told: None, warn: Any = print, **worker: Any) -> Any:
    return list(results(_with(**worker), (folder,), Placement(actors, actors, 1, 0), BLOCKS, told, warn))


def _with(**options: Any) -> type:
    class One(Worker):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder, **options)

    return One


def _begun(folder: Path) -> list[int]:
    """How often each block was begun."""
    return [len((folder / str(block.number)).read_text().splitlines()) for block in BLOCKS]


def test_each_block_is_done_once_and_told(connected: Any, tmp_path: Path) -> None:
    told: list[Told] = []
    # Three actors find no room: that is no reason to wait.
    done = _results(tmp_path, 5, told.append)
    assert sorted(number for number, _ in done) == list(range(8)) and _begun(tmp_path) == [1] * 8
    assert len({process for _, process in done}) == 2
    seen = {number: sums for one in told for number, sums in one.items()}
    assert seen and all(sums == (3, 7) for sums in seen.values())


def test_a_block_whose_worker_dies_is_done_again(connected: Any, tmp_path: Path) -> None:
    done = _results(tmp_path, dies=ATTEMPTS - 1)
    assert sorted(number for number, _ in done) == list(range(8))
    assert _begun(tmp_path) == [1, 1, ATTEMPTS, 1, 1, 1, 1, 1]


def test_a_block_that_kills_all_workers_is_named(connected: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"in\.txt, records 7 and the 2 that follow: a worker died 4 times"):
        _results(tmp_path, dies=ATTEMPTS)


def test_nodes_that_are_gone_do_not_count(connected: Any) -> None:
    gone, here = connected.add_node(num_cpus=1), ray.get_runtime_context().get_node_id()
    with pytest.raises(WorkerError):
        actors._check(BLOCKS[0], [gone.node_id, here, here, here], ERROR)
    connected.remove_node(gone, allow_graceful=False)
    connected.wait_for_nodes()
    actors._check(BLOCKS[0], [gone.node_id, here, here, here], ERROR)
    with pytest.raises(WorkerError):
        actors._check(BLOCKS[0], [here] * ATTEMPTS, ERROR)


def test_the_others_go_on_when_a_node_dies_and_none_comes(connected: Any, tmp_path: Path) -> None:
    found = results(_with(), (tmp_path,), Placement(2, 2, 1, 0), BLOCKS, lambda told: None, print)
    done = [next(found)]
    connected.remove_node(next(iter(connected.worker_nodes)), allow_graceful=False)
    done += found
    assert sorted(number for number, _ in done) == list(range(8))
    assert sum(_begun(tmp_path)) <= 9  # the one that the node was at


def test_errors_of_workers_are_raised(connected: Any, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        _results(tmp_path, dies=-1)


def test_actors_that_cannot_be_made_are_given_up(connected: Any, tmp_path: Path) -> None:
    warned: list[str] = []
    done = _results(tmp_path, fails=1, warn=warned.append)
    assert len(done) == 8 and len(warned) == 1 and warned[0].startswith("an actor is given up, 1 are left")
    with pytest.raises(ray.exceptions.RayError, match="no model"):
        _results(tmp_path, fails=99, warn=warned.append)


def test_an_actor_that_always_dies_is_given_up(connected: Any, tmp_path: Path) -> None:
    warned: list[str] = []
    done = _results(tmp_path, bad=True, warn=warned.append)
    assert sorted(number for number, _ in done) == list(range(8)) and len(warned) == 1
    assert sum(_begun(tmp_path)) == 8 + ATTEMPTS


def test_who_waits_for_room_is_told(connected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_PATIENCE_SECONDS", 1.0)

    class Found(Exception):
        pass

    def warn(text: str) -> None:
        assert "no room" in text
        raise Found

    with pytest.raises(Found):
        list(results(Worker, (tmp_path,), Placement(1, 1, 64, 0), BLOCKS, lambda told: None, warn))
