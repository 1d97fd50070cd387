"""One thread per test process, and fastgen as it was after each test."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the transformers adapter needs torch")
pytest.importorskip("transformers", reason="transformers is not installed")


import torch
import transformers
import zoo

import fastgen
from fastgen.cache import tree
from fastgen.cache.tree import BeamTree

torch.set_num_threads(int(os.environ.get("FASTGEN_TEST_THREADS", "1")))
transformers.logging.set_verbosity_error()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than half a minute; deselect with -m 'not slow'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What 4.57 leaves to stock has no path to test there; that it falls back is what test_families.py checks."""
    if zoo.MAJOR >= 5:
        return
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
        if item.path.name != "test_families.py" and any(value in zoo.FALLBACK for value in parameters):
            item.add_marker(pytest.mark.skip(reason="falls back on this version of transformers"))


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Each test starts from the default settings and ends with fastgen enabled."""
    before = dataclasses.asdict(fastgen.config.current())
    fastgen.configure(strict=False, tier="auto", history=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    fastgen.configure(**before)
    assert fastgen.status().enabled, "a test left fastgen disabled"
    assert not (hooked := zoo.forget_hooked()), f"a test left hooks on the shared {hooked}: the host's own, perhaps"


@pytest.fixture
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prune before each step, whether it pays or not; the slots that stayed each time."""
    stayed: list[int] = []
    prune = BeamTree._prune

    def counted(self: BeamTree, slots: torch.Tensor) -> None:
        stayed.append(slots.shape[1])
        prune(self, slots)

    monkeypatch.setattr(BeamTree, "_is_full", lambda self: True)
    monkeypatch.setattr(BeamTree, "_prune", counted)
    monkeypatch.setattr(tree, "_WORTH_PRUNING", 1.0)
    return stayed
