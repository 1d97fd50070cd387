"""Decides how many actors there are, and how many CPUs and GPUs each gets."""

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
    """The number of actors, and the resources of each, to ask Ray for."""

    least: int  # number of actors
    most: int
    cpus: float  # for each actor
    gpus: float


def placement(actors: str | None, cpus: float | None, gpus: float | None, nodes: list[Node]) -> Placement:
    """The placement that the user asks for; by default an actor for each GPU, else one with all CPUs for each node.

    Args:
        actors: "N", or "LEAST:MOST", between which Ray chooses as the cluster grows and shrinks.
    """
    if not nodes:
        raise InputError("The Ray cluster has no nodes: `ray start` adds one.")
    if gpus is None:
        gpus = 1.0 if any(node.gpus for node in nodes) else 0.0
    # A head node is often started without CPUs, so that no work is placed on it.
    able = [node for node in nodes if node.cpus and node.gpus >= gpus] or [Node(1, gpus)]
    if actors is None:
        room = [int(node.gpus / gpus) if gpus else 1 for node in able]
        least = most = max(1, sum(room))
    else:
        least, most = _range(actors)
    if cpus is None:
        share = -(-least // len(able))  # actors on a node
        each = min(node.cpus for node in able) / share
        cpus = 1.0 if gpus else float(int(each)) if each >= 1 else each
    return Placement(least, most, cpus, gpus)


def nodes_of(nodes: list[dict[str, Any]]) -> list[Node]:
    """The living nodes, from the result of `ray.nodes()`."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return [Node(one.get("CPU", 0), one.get("GPU", 0)) for one in resources]


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"--actors {text}: give a number from 1, or two with a colon, such as 2:8.")
    return least, most
