"""The harness and the zoo of the adapter's tests, and one thread per test process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
