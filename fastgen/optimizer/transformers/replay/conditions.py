"""Decides which calls replay decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen import config
from fastgen.optimizer.transformers import equivalence, versions
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import replayer, statistics


def replayer_for(request: Request, stock: Callable[..., Any]) -> replayer.Replayer | None:
    """The replayer of this call's steps; None if they are not replayed."""
    model, device = request.model, request.input_ids.device
    rows, steps = request.input_ids.shape[0], request.generation_config.max_length - request.input_ids.shape[1]
    # Greedy search and sampling run in the host's own loop, which lets no sentence leave.
    stay = request.batch == 1 or not request.is_beam_search
    if not versions.COUNTS_IN_TENSORS or not statistics.are_wanted(model, device.type, stay, rows, steps):
        return None
    if config.current().cache_threshold:  # which weights are left out differs from step to step
        return None
    # Code that watches, has replaced or may change parts of the model while it decodes expects them to be called.
    if request.calls_back or request.foreign or request.facts.is_watched:
        return None
    if reason := equivalence.failed_equivalence(request, stock, is_replayed=True):
        statistics.note_failed_equivalence(model, reason)
        return None
    return replayer.Replayer(device)
