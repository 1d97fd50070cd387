"""What all workers of a run tell one actor. A module of its own: that actor needs no torch."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Counter:
    """Records and tokens of each block so far, and where it was begun."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}
        self._attempts: dict[int, list[str]] = {}  # the node of each

    def begin(self, block: int, node: str) -> int:
        """How often it was begun, this time included; not counted are nodes that are gone: no block's fault."""
        attempts = self._attempts.setdefault(block, [])
        attempts.append(node)
        alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
        return sum(one in alive for one in attempts)

    def add(self, block: int, records: int, tokens: int) -> None:
        self._blocks[block] = records, tokens

    def total(self) -> tuple[int, int]:
        return sum(one for one, _ in self._blocks.values()), sum(one for _, one in self._blocks.values())


def start_counter() -> Any:
    """A Counter on the driver's own node: it lasts as long as the run."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Counter).remote()
