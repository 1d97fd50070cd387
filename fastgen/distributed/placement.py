"""How many actors, and what of a node each one gets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fastgen.pipeline.errors import InputError


@dataclass(frozen=True)
class Node:
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Placement:
    """What Ray is asked for."""

    least: int  # actors
    most: int
    cpus: float  # for each
    gpus: float


def placement(actors: str | None, cpus: float | None, gpus: float | None, nodes: list[Node]) -> Placement:
    """With what the user said, and of the rest: an actor for each GPU, or else one for each node and all its CPUs.

    Args:
        actors: "N", or "LEAST:MOST" for Ray to choose from as the cluster grows and shrinks.
    """
    if not nodes:
        raise InputError("The Ray cluster has no nodes: `ray start` adds one.")
    if gpus is None:
        gpus = 1.0 if any(node.gpus for node in nodes) else 0.0
    # A head is often begun without CPUs, so that no work is placed on it.
    able = [node for node in nodes if node.cpus and node.gpus >= gpus] or [Node(1, gpus)]
    if actors is None:
        room = [int(node.gpus / gpus) if gpus else 1 for node in able]
        least = most = max(1, sum(room))
    else:
        least, most = _range(actors)
    if cpus is None:
        share = -(-least // len(able))  # of the actors on a node
        each = min(node.cpus for node in able) / share
        cpus = 1.0 if gpus else float(int(each)) if each >= 1 else each
    return Placement(least, most, cpus, gpus)


def nodes_of(nodes: list[dict[str, Any]]) -> list[Node]:
    """The nodes that live, of what `ray.nodes()` says."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return [Node(one.get("CPU", 0), one.get("GPU", 0)) for one in resources]


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"--actors {text}: give a number from 1, or two with a colon, such as 2:8.")
    return least, most
