"""Decides which calls replay decode steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fastgen.optimizer.transformers import equivalence
from fastgen.optimizer.transformers.model.modules import decoder_modules
from fastgen.optimizer.transformers.replay.guards import guards_of_steps
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import may_be_replayed
from fastgen.patching import replaced_code
from fastgen.replay import replayer, statistics
from fastgen.replay.guarded import GuardedReplayer
from fastgen.replay.guards import ModelGuards


def replayer_for(request: Request, stock: Callable[..., Any]) -> replayer.Replayer | None:
    """The replayer of this call's steps; None if they are not replayed."""
    if not may_be_replayed(request):
        return None
    if reason := equivalence.failed_equivalence(request, stock, is_replayed=True):
        statistics.note_failed_equivalence(request.model, reason)
        return None
    device = request.input_ids.device
    if not request.calls_back:
        return replayer.Replayer(device)
    guarded = GuardedReplayer(device, functools.partial(_look, request.model))
    return guarded if guarded.may_replay else None


def _look(model: nn.Module) -> ModelGuards | None:
    """Guards of the model's steps; None if code of the user's sees them, or if a change could not be seen."""
    if replaced_code.is_watched(decoder_modules(model)):
        return None
    guards = guards_of_steps(model)
    return guards if guards.is_complete else None
