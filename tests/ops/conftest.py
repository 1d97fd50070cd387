"""The oracle beside this file importable, and each implementation of the operators as a fixture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operators need torch")

sys.path.insert(0, str(Path(__file__).parent))

import torch

from fastgen import ops, report
from fastgen.ops import reference

# fastgen.ops is loaded once; the tests forget what was reported.
LOADED = report.operators()


def implementation_of(kind: str) -> Any:
    """The operators as functions: torch's own choice for the CPU, or the reference."""
    if kind == "reference":
        return reference
    if not ops.is_native(torch.device("cpu")):
        pytest.skip(f"no native operators: {LOADED['topk_log_softmax']}")
    return ops


@pytest.fixture(params=["native", "reference"])
def operators(request: pytest.FixtureRequest) -> Any:
    return implementation_of(request.param)


@pytest.fixture
def native() -> Any:
    return implementation_of("native")


@pytest.fixture
def threads() -> Any:
    """`threads(n)` sets torch's number of threads for this test."""
    before = torch.get_num_threads()
    change: Callable[[int], None] = torch.set_num_threads
    yield change
    torch.set_num_threads(before)
