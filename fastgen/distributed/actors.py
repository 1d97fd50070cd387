"""Blocks through a pool of Ray's actors.

Of Ray's core, not of Ray Data: that keeps three actors of its own running beside them, which cost a tenth of the speed
where a model has two cores.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from fastgen.distributed.blocks import Block
from fastgen.distributed.connection import living_nodes
from fastgen.distributed.placement import Placement
from fastgen.pipeline.errors import WorkerError, first_line

ATTEMPTS = 4  # a block that kills its worker this often is at fault itself; so is an actor that finishes none between
PROGRESS = "progress"  # a thread that answers while a block is generated
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError)

Told = dict[int, tuple[int, int]]  # by the numbers of the blocks that run: records and tokens so far


def results(
    worker: type,
    arguments: Sequence[Any],
    how: Placement,
    blocks: Sequence[Block],
    told: Callable[[Told], None],
    warn: Callable[[str], None],
) -> Generator[Any, None, None]:
    """What `worker.generate` returns for each block, in any order.

    Ray places actors, starts those that die again, and takes those that wait for room for what a growing cluster needs.
    A block whose worker dies comes after those that are left, for whichever actor is free; an actor that can't be made,
    or dies again and again, is given up while there are others; those that find no block left make room.

    Args:
        worker: with the methods of `worker.BlockWorker`; each actor has one, made with `arguments`.
        told: is called twice a second.
        warn: is called with a sentence about what is given up, or waits.

    Raises:
        WorkerError: a block's worker died `ATTEMPTS` times; nodes that are gone don't count: no block's fault.
        RayError: of anything else that Ray can't do.
    """
    remote = ray.remote(concurrency_groups={PROGRESS: 1})(worker).options(
        num_cpus=how.cpus, num_gpus=how.gpus, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
    )
    pool = _Pool([remote.remote(*arguments) for _ in range(min(how.most, len(blocks)))], blocks, warn)
    sums = _Sums()
    asked = worked = time.monotonic()
    try:
        while pool.left or pool.running:
            done, _ = ray.wait([*pool.running, *pool.starting], timeout=_POLL_SECONDS)
            now = time.monotonic()
            if now - asked >= _POLL_SECONDS:
                asked = now
                told(sums.of([(actor, block.number) for actor, _, block in pool.running.values()]))
            if pool.running:
                worked = now
            elif now - worked >= _PATIENCE_SECONDS:
                worked = float("inf")  # said once
                warn("no actor has begun for a minute: Ray has no room for one, or none of its workers starts.")
            for reference in done:
                if reference in pool.starting:
                    pool.started(reference)
                else:
                    yield from pool.ended(reference)
    finally:
        for actor in pool.actors:
            with contextlib.suppress(Exception):  # it must not hide what ended the run
                ray.kill(actor)


class _Pool:
    """Which actor starts, or is at which block, and who died of what."""

    def __init__(self, actors: list[Any], blocks: Sequence[Block], warn: Callable[[str], None]) -> None:
        self.actors, self._warn = actors, warn
        self.left = deque(blocks)
        self.starting = {_node(actor): actor for actor in actors}  # by what is waited for, here and below
        self.running: dict[Any, tuple[Any, str, Block]] = {}  # actor, its node, what it does
        self._deaths: dict[int, list[str]] = {}  # by the number of the block: the nodes
        self._in_a_row: Counter[Any] = Counter()  # deaths of an actor since it finished a block

    def started(self, reference: Any) -> None:
        """An actor is there, or can't be made."""
        actor = self.starting.pop(reference)
        try:
            node = ray.get(reference)
        except RayError as error:
            self._give_up(actor, error)
        else:
            self._next(actor, node)

    def ended(self, reference: Any) -> Iterator[Any]:
        """An actor is done with its block, or died of it; what it returned."""
        actor, node, block = self.running.pop(reference)
        try:
            one = ray.get(reference)
        except _DEATHS as error:
            self._died(actor, node, block, error)
        else:
            self._in_a_row[actor] = 0
            yield one
            self._next(actor, node)

    def _next(self, actor: Any, node: str) -> None:
        if self.left:
            block = self.left.popleft()
            self.running[actor.generate.remote(block)] = actor, node, block
        else:
            self._remove(actor)

    def _died(self, actor: Any, node: str, block: Block, error: RayError) -> None:
        self.left.append(block)
        self._deaths.setdefault(block.number, []).append(node)
        _check(block, self._deaths[block.number], error)
        self._in_a_row[actor] += 1
        if self._in_a_row[actor] >= ATTEMPTS and len(self.actors) > 1:
            self._give_up(actor, error)
        else:
            self.starting[_node(actor)] = actor

    def _give_up(self, actor: Any, error: RayError) -> None:
        self._remove(actor)
        if not self.actors:
            raise error
        self._warn(f"an actor is given up, {len(self.actors)} are left: {first_line(error)}")

    def _remove(self, actor: Any) -> None:
        self.actors.remove(actor)
        ray.kill(actor)


def _node(actor: Any) -> Any:
    """The node to come of an actor that starts, or that Ray starts again."""
    return actor.node.options(max_task_retries=-1).remote()


class _Sums:
    """How far the blocks that run are, as far as their actors have said. None is waited for, or asked twice at once."""

    def __init__(self) -> None:
        self._asked: dict[Any, Any] = {}
        self._known: Told = {}

    def of(self, running: Iterable[tuple[Any, int]]) -> Told:
        waiting = list(self._asked)
        for reference in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else ():
            del self._asked[reference]
            with contextlib.suppress(RayError):  # it died
                number, records, tokens = ray.get(reference)
                self._known[number] = records, tokens
        busy = set(self._asked.values())
        self._asked |= {actor.told.remote(): actor for actor, _ in running if actor not in busy}
        # An answer may be about the block before.
        self._known = {number: self._known[number] for _, number in running if number in self._known}
        return dict(self._known)


def _check(block: Block, nodes: list[str], error: RayError) -> None:
    alive = living_nodes()
    if sum(node in alive for node in nodes) >= ATTEMPTS:
        raise WorkerError(
            f"{block}: a worker died {ATTEMPTS} times at these records, --resume goes on: {first_line(error)}"
        ) from error
