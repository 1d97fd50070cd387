"""One thread per test process, and what writes the pages importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the pages' blocks need torch")
pytest.importorskip("transformers", reason="the pages' blocks need transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))  # what writes the pages

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
