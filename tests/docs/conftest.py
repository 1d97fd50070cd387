"""One thread per test process, and the helpers beside this file and of other folders importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the pages' blocks need torch")
pytest.importorskip("transformers", reason="the pages' blocks need transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))  # what writes the pages
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))  # fairseq_kit
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))  # prophetnet_kit
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
