"""One thread per test process, and the helpers beside this file importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the commands need torch")

sys.path.insert(0, str(Path(__file__).parent))  # fairseq_kit, whatever pytest's import mode

import torch

torch.set_num_threads(1)
