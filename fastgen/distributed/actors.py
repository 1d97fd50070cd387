"""Runs blocks through a pool of Ray actors.

It uses Ray's core, not Ray Data, which keeps three further actors running: they cost a tenth of the speed where a model
has two cores.
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

ATTEMPTS = 4  # a block that kills a worker this often is at fault; so is an actor that finishes none in between
PROGRESS = "progress"  # a thread that answers while a block is generated
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError)

Told = dict[int, tuple[int, int]]  # records and tokens so far, by number of a running block


def results(
    worker: type,
    arguments: Sequence[Any],
    how: Placement,
    blocks: Sequence[Block],
    told: Callable[[Told], None],
    warn: Callable[[str], None],
) -> Generator[Any, None, None]:
    """Yield what `worker.generate` returns for each block, in any order.

    Ray places actors and restarts those that die; actors that wait for room tell it how far to grow a cluster. A block
    whose worker dies is queued again, for any free actor. An actor that can't be made, or dies again and again, is
    given up while there are others; an actor that finds no block left is removed.

    Args:
        worker: a class with the methods of `worker.BlockWorker`; each actor has one object, made with `arguments`.
        told: called twice a second with the progress of running blocks.
        warn: called with a sentence about an actor that is given up, or that nothing starts.

    Raises:
        WorkerError: a block's worker died `ATTEMPTS` times; deaths on nodes that are gone don't count.
        RayError: for anything else that Ray can't do.
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
                worked = float("inf")  # warn only once
                warn("no actor has begun for a minute: Ray has no room for one, or none of its workers starts.")
            for reference in done:
                if reference in pool.starting:
                    pool.started(reference)
                else:
                    yield from pool.ended(reference)
    finally:
        for actor in pool.actors:
            with contextlib.suppress(Exception):  # an error here must not hide the one that ended the run
                ray.kill(actor)


class _Pool:
    """The actors that start or run, the blocks that are left, and the deaths so far."""

    def __init__(self, actors: list[Any], blocks: Sequence[Block], warn: Callable[[str], None]) -> None:
        self.actors, self._warn = actors, warn
        self.left = deque(blocks)
        self.starting = {_node(actor): actor for actor in actors}  # by the reference to wait for, here and below
        self.running: dict[Any, tuple[Any, str, Block]] = {}  # actor, node and block
        self._deaths: dict[int, list[str]] = {}  # nodes of workers that died, by number of the block
        self._in_a_row: Counter[Any] = Counter()  # deaths of an actor since it last finished a block

    def started(self, reference: Any) -> None:
        """Handle an actor that has started, or that can't be made."""
        actor = self.starting.pop(reference)
        try:
            node = ray.get(reference)
        except RayError as error:
            self._give_up(actor, error)
        else:
            self._next(actor, node)

    def ended(self, reference: Any) -> Iterator[Any]:
        """Handle an actor that has finished a block, or died; yields the block's result."""
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
    """A reference to the node of an actor, ready once Ray has started or restarted the actor."""
    return actor.node.options(max_task_retries=-1).remote()


class _Sums:
    """The progress of running blocks, as last told by the actors, which are asked without waiting for answers."""

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
        # An answer may be about an actor's previous block.
        self._known = {number: self._known[number] for _, number in running if number in self._known}
        return dict(self._known)


def _check(block: Block, nodes: list[str], error: RayError) -> None:
    alive = living_nodes()
    if sum(node in alive for node in nodes) >= ATTEMPTS:
        raise WorkerError(
            f"{block}: a worker died {ATTEMPTS} times at these records, --resume goes on: {first_line(error)}"
        ) from error
