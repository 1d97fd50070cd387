"""One thread per test process, and fastgen as it was after each test."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the fairseq adapter needs torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fairseq", reason="fairseq is not installed", exc_type=ImportError)


import torch

import fastgen
from fastgen.layers import packed_weights

torch.set_num_threads(int(os.environ.get("FASTGEN_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Each test starts from the default settings and ends with fastgen enabled."""
    logging.disable(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert fastgen.status().enabled, "a test left fastgen disabled"


@pytest.fixture
def always_packed() -> Iterator[None]:
    """Every product that can be is packed, and no copy is there before."""
    if (reason := packed_weights.unavailable()) is not None:
        pytest.skip(f"no packed products here: {reason}")
    packed_weights.release()
    fastgen.configure(packing="always")
    yield
    packed_weights.release()
