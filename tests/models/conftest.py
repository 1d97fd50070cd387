"""One thread per test process; the kits beside this file, and the adapter's harness and zoo, importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the models need torch")
pytest.importorskip("transformers", reason="transformers is not installed")

# Whatever pytest's import mode.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))

import torch
import transformers

torch.set_num_threads(int(os.environ.get("FASTGEN_TEST_THREADS", "1")))
transformers.logging.set_verbosity_error()
