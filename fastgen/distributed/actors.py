"""Blocks through a pool of Ray's actors.

Of Ray's core, not of Ray Data: that keeps three actors of its own running beside them, which cost a tenth of the speed
where a model has two cores.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fastgen.distributed.blocks import Block
from fastgen.distributed.placement import Placement
from fastgen.pipeline.errors import WorkerError

ATTEMPTS = 4  # a block that kills its worker this often is at fault itself
PROGRESS = "progress"  # a thread that answers while a block is generated
_POLL_SECONDS = 0.5

Told = dict[int, tuple[int, int]]  # by the numbers of the blocks that run: records and tokens so far


def results(
    worker: type, arguments: Sequence[Any], how: Placement, blocks: Sequence[Block], told: Callable[[Told], None]
) -> Generator[Any, None, None]:
    """What `worker.generate` returns for each block, in any order.

    Ray places actors, starts those that die again, and takes those that wait for room for what a growing cluster needs.
    A block whose worker dies goes to the next actor that is free, and those that find no block left make room.

    Args:
        worker: with the methods of `worker.BlockWorker`; each actor has one, made with `arguments`.
        told: is called twice a second.

    Raises:
        WorkerError: a block's worker died `ATTEMPTS` times; nodes that are gone don't count: no block's fault.
        RayError: of anything else that Ray can't do.
    """
    remote = ray.remote(concurrency_groups={PROGRESS: 1})(worker)
    remote = remote.options(num_cpus=how.cpus, num_gpus=how.gpus, max_restarts=-1, max_task_retries=0)
    actors = [remote.remote(*arguments) for _ in range(min(how.most, len(blocks)))]
    starting = {_node(actor): actor for actor in actors}
    running: dict[Any, tuple[Any, str, Block]] = {}  # actor, its node, what it does
    left = deque(blocks)
    deaths: dict[int, list[str]] = {}  # by the number of the block: the nodes
    last = time.monotonic()
    try:
        while left or running:
            done, _ = ray.wait([*running, *starting], timeout=_POLL_SECONDS)
            if (now := time.monotonic()) - last >= _POLL_SECONDS:
                last = now
                told(_told([actor for actor, _, _ in running.values()]))
            for reference in done:
                if reference in starting:
                    actor, node = starting.pop(reference), ray.get(reference)
                else:
                    actor, node, block = running.pop(reference)
                    try:
                        yield ray.get(reference)
                    except RayTaskError:  # nothing of Ray's: it would be so again
                        raise
                    except RayError:
                        left.appendleft(block)
                        deaths.setdefault(block.number, []).append(node)
                        _check(block, deaths[block.number])
                        starting[_node(actor)] = actor
                        continue
                if left:
                    block = left.popleft()
                    running[actor.generate.remote(block)] = actor, node, block
                else:
                    ray.kill(actor)
    finally:
        with contextlib.suppress(RayError):
            for actor in actors:
                ray.kill(actor)


def _node(actor: Any) -> Any:
    """The node to come of an actor that starts, or that Ray starts again."""
    return actor.node.options(max_task_retries=-1).remote()


def _told(actors: list[Any]) -> Told:
    asked = [actor.told.remote() for actor in actors]
    found = {}
    for reference in ray.wait(asked, num_returns=len(asked), timeout=_POLL_SECONDS)[0] if asked else ():
        with contextlib.suppress(RayError):  # it died
            block, records, tokens = ray.get(reference)
            found[block] = records, tokens
    return found


def _check(block: Block, nodes: list[str]) -> None:
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if sum(node in alive for node in nodes) >= ATTEMPTS:
        raise WorkerError(f"{block}: a worker died {ATTEMPTS} times at these records")
