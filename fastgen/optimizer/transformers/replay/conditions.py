"""Decides which calls replay decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.optimizer.transformers import equivalence
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import may_be_replayed
from fastgen.replay import replayer, statistics


def replayer_for(request: Request, stock: Callable[..., Any]) -> replayer.Replayer | None:
    """The replayer of this call's steps; None if they are not replayed."""
    if not may_be_replayed(request):
        return None
    if reason := equivalence.failed_equivalence(request, stock, is_replayed=True):
        statistics.note_failed_equivalence(request.model, reason)
        return None
    return replayer.Replayer(request.input_ids.device)
