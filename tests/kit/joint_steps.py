"""Proof that transformers' calls decoded together."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.optimizer.transformers.generate import batch_decoder

Spans = list[list[tuple[int, int]]]


def watch(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Rows and position of every call, at every joint step from now on."""
    seen: Spans = []
    step = batch_decoder.BatchDecoder.step

    def counted(self: Any, inputs: dict[str, Any]) -> Any:
        seen.append(list(self.session.spans))
        return step(self, inputs)

    monkeypatch.setattr(batch_decoder.BatchDecoder, "step", counted)
    return seen
