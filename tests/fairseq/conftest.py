"""One thread per test process, the helpers beside this file importable, and fastgen as it was after each test."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the fairseq adapter needs torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fairseq", reason="fairseq is not installed", exc_type=ImportError)

sys.path.insert(0, str(Path(__file__).parent))  # models and judge, whatever pytest's import mode

import torch

import fastgen

torch.set_num_threads(1)
logging.disable(logging.INFO)


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Each test starts from the default settings and ends with fastgen enabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert fastgen.status().enabled, "a test left fastgen disabled"
