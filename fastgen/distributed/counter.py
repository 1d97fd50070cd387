"""What all workers of a run tell one actor. A module of its own: that actor needs no torch."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Counter:
    """Records and tokens of each block so far, and how often it was begun."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}
        self._attempts: dict[int, int] = {}

    def begin(self, block: int) -> int:
        self._attempts[block] = self._attempts.get(block, 0) + 1
        return self._attempts[block]

    def add(self, block: int, records: int, tokens: int) -> None:
        self._blocks[block] = records, tokens

    def total(self) -> tuple[int, int]:
        return sum(one for one, _ in self._blocks.values()), sum(one for _, one in self._blocks.values())


def start_counter() -> Any:
    """A Counter on the driver's own node: it lasts as long as the run."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Counter).remote()
