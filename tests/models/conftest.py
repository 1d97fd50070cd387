"""One thread per test process."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the models need torch")
pytest.importorskip("transformers", reason="transformers is not installed")


import torch
import transformers

torch.set_num_threads(int(os.environ.get("FASTGEN_TEST_THREADS", "1")))
transformers.logging.set_verbosity_error()
