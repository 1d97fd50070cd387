"""Tests of the adapter for openai-whisper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the whisper adapter needs torch")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Whisper's alignment of words is compiled by numba, whose threads are OpenMP's: it changes how many torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
