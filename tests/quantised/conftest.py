"""The settings of the transformers tests, for models that other libraries have quantised."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
