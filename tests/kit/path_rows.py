"""Counts the rows of the operator that attends along paths, where a module calls it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


def counted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the module's `path_attention` from now on."""
    rows: list[int] = []
    operator = module.path_attention

    def attention(query: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(query.shape[0])
        return operator(query, *args)

    monkeypatch.setattr(module, "path_attention", attention)
    return rows
