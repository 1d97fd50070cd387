"""A published Whisper and a recording of eleven seconds, for tests that need real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def whisper_base(shared: Path) -> Path:
    """The folder with the model: FASTGEN_WHISPER, or the shared one."""
    found = Path(os.environ.get("FASTGEN_WHISPER") or shared / "models" / "whisper-base")
    if not (found / "model.safetensors").exists():
        pytest.skip(f"needs {found}, or a Whisper where FASTGEN_WHISPER says")
    return found


def clip(shared: Path) -> Any:
    """The recording's samples."""
    found = shared / "data/audio/jfk.npy"
    if not found.exists():
        pytest.skip(f"needs {found}")
    return np.load(found).astype(np.float32)
