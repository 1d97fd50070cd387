"""A Ray cluster of several nodes on this machine: a process each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastgen import config

NODES = 2


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A node for the driver, which has no CPUs for actors, and those for actors."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def cluster(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes, whatever became of them in the test before."""
    # In actors, driver and the command without Ray: else timings choose products, and the last digits of scores.
    monkeypatch.setenv("FASTGEN_PACKING", "off")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    config.reset()
    for node in list(nodes.worker_nodes):
        if not node.remaining_processes_alive():
            nodes.remove_node(node)
    while len(nodes.worker_nodes) < NODES:
        nodes.add_node(num_cpus=1)
    return nodes


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """200 inputs of the shipped model."""
    chance = random.Random(3)
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{chance.randrange(10 ** chance.randrange(1, 6))}\n" for _ in range(200)))
    return source
