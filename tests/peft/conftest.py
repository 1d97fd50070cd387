"""One thread per test process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PEFT needs torch")
pytest.importorskip("transformers", reason="transformers is not installed")


import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
