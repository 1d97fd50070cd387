"""A Ray cluster of several nodes on this machine: a process each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A node for the driver, which has no CPUs for actors, and two for those."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fastgen[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    if before is None:
        os.environ.pop("RAY_ADDRESS")
    else:
        os.environ["RAY_ADDRESS"] = before
    cluster.shutdown()


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """200 inputs of the shipped model."""
    chance = random.Random(3)
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{chance.randrange(10 ** chance.randrange(1, 6))}\n" for _ in range(200)))
    return source
