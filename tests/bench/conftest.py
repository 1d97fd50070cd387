"""The helpers beside this file importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # bench_kit, whatever pytest's import mode
