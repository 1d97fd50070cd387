"""Each implementation of the operators as a fixture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operators need torch")


import torch
from build_kit import ROOT
from references import reference

from fastgen import ops, report
from fastgen.ops import builder

# The libraries are loaded once; the tests forget what was reported.
ops.is_native(torch.device("cpu"))
LOADED = report.operators()


def implementation_of(kind: str) -> Any:
    """The operators as functions: torch's own choice for the CPU, or the reference."""
    if kind == "reference":
        return reference
    if not ops.is_native(torch.device("cpu")):
        pytest.skip(f"no native operators: {LOADED['topk_log_softmax']}")
    return ops


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs the native operators, by the fixtures below: `-m native`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("operators") == "native" or "native" in getattr(item, "fixturenames", ()):
        item.add_marker("native")


@pytest.fixture(autouse=True)
def native_on_cuda(request: pytest.FixtureRequest) -> None:
    """Tests on a GPU prove nothing on the reference: where its operators could have been built, that is a failure."""
    if request.node.get_closest_marker("gpu") is None or ops.is_native(torch.device("cuda")):
        return
    try:
        builder.recipe("cuda")
    except builder.Unavailable as reason:
        pytest.skip(f"no native operators on CUDA: {reason}")
    pytest.fail(f"the CUDA operators are not native: {LOADED['topk_log_softmax']}")


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


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its sources, to break; without libraries built ahead of time."""
    unneeded = shutil.ignore_patterns("*.safetensors", "__pycache__", "_native")
    shutil.copytree(ROOT / "fastgen", tmp_path / "copy/fastgen", ignore=unneeded)
    shutil.copytree(builder.source_folder(), tmp_path / "copy/csrc")
    return tmp_path / "copy"
