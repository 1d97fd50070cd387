"""Which calls replay their decode steps, and what became of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fastgen import config, report
from fastgen.decoding import replay
from fastgen.optimizer.transformers import host, modules, proof, recordings
from fastgen.optimizer.transformers.requests import Request

_lock = threading.Lock()
_counts: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()  # captures and replays
_disproofs: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # proof remembers its verdicts
_failures: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


# On a CPU: with more rows a step's Python is nothing beside its products, and with more sentences some leave, each time
# of which the step must be recorded anew. That costs as much as some ten replays save.
_FEW_ROWS, _MIN_STEPS = 32, 12


def replayer_for(request: Request, stock: Callable[..., Any]) -> replay.Replayer | None:
    """What replays this call's steps; None where they run by themselves."""
    model = request.model
    if not host.COUNTS_IN_TENSORS or not _is_wanted(request) or model in _failures:
        return None
    # Whoever watches, has replaced something or may change the model while it decodes expects it to be called.
    if request.calls_back or modules.is_watched(modules.of_steps(model)):
        return None
    if reason := proof.disproof(request, stock, is_replayed=True):
        with _lock:
            _disproofs[model] = reason
        return None
    return replay.Replayer(request.input_ids.device)


def _is_wanted(request: Request) -> bool:
    settings, device = config.current(), request.input_ids.device.type
    if device == "cuda":
        return settings.cuda_graphs
    if device != "cpu" or settings.replay == "off" or settings.compile:
        return False
    steps = request.generation_config.max_length - request.input_ids.shape[1]
    is_short = request.batch == 1 and request.input_ids.shape[0] <= _FEW_ROWS
    return settings.replay == "always" or (is_short and steps >= _MIN_STEPS)


def note(request: Request, replayer: replay.Replayer) -> None:
    """Count what a call has captured and replayed; a model whose steps cannot be captured is not asked again."""
    with _lock:
        captures, replays = _counts.get(request.model, (0, 0))
        _counts[request.model] = captures + replayer.counts.captures, replays + replayer.counts.replays
    if replayer.failure:
        _fails(request.model, replayer.failure)


def _fails(model: nn.Module, reason: str) -> None:
    with _lock:
        _failures[model] = reason
    report.log(f"{type(model).__name__}'s steps are not replayed: {reason}")


def replayed() -> dict[str, str]:
    """What became of replaying steps, by class of the model."""
    with _lock:
        counts = {
            type(model).__name__: f"{captures} captured, {replays} steps replayed{_kept(model)}"
            for model, (captures, replays) in _counts.items()
        }
        reasons = [*_disproofs.items(), *_failures.items()]
        return {**counts, **{type(model).__name__: f"none, {reason}" for model, reason in reasons}}


def _kept(model: nn.Module) -> str:
    count = recordings.count(model)
    return f", {count} kept for later calls" if count else ""


def release() -> None:
    """Forget what became of it: a model may be tried again."""
    with _lock:
        _counts.clear()
        _disproofs.clear()
        _failures.clear()
