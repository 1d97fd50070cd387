"""One thread per test process; the transformers adapter's harness and zoo importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PEFT needs torch")
pytest.importorskip("transformers", reason="transformers is not installed")

# Whatever pytest's import mode.
sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
