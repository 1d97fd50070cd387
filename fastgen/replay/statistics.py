"""Decides which models' steps are replayed, and records the outcome for all hosts."""

from __future__ import annotations

import weakref

from torch import nn

from fastgen import config, locks, report
from fastgen.memory.release import keeper
from fastgen.replay import store
from fastgen.replay.replayer import NO_MEMORY, Counts, Replayer

# On a CPU: with more rows a step's Python is little beside its products. Where sentences leave, the step must be
# recorded anew each time, which costs as much as some ten replays save.
_FEW_ROWS, _MIN_STEPS = 32, 12

_lock = locks.reentrant_lock()
_counts: weakref.WeakKeyDictionary[nn.Module, Counts] = weakref.WeakKeyDictionary()
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_failed_equivalences: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_failures: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def are_wanted(model: nn.Module, device: str, stay: bool, rows: int, steps: int) -> bool:
    """Whether a call of so many `steps` should replay them, on a `device` of this type.

    `stay`: all sentences stay until the call's end.
    """
    settings = config.current()
    if model in _failures:
        return False
    if device == "cuda":
        return settings.cuda_graphs
    if device != "cpu" or settings.replay == "off":
        return False
    return settings.replay == "always" or (stay and rows <= _FEW_ROWS and steps >= _MIN_STEPS)


def note(model: nn.Module, replayer: Replayer, owner: nn.Module | None = None) -> None:
    """Count what a call has captured and replayed; a model whose steps cannot be captured is not asked again.

    `owner`: the module that keeps the recordings, if not the model itself.
    """
    with _lock:
        replayer.counts.uncaptured = replayer.uncaptured or ""
        _counts.setdefault(model, Counts()).add(replayer.counts)
        if owner is not None and owner is not model:
            _owners[model] = weakref.ref(owner)
        if replayer.failure and replayer.failure != NO_MEMORY:  # the next call may find more
            _failures[model] = replayer.failure
    if replayer.failure:
        report.log(f"{type(model).__name__}'s steps are not replayed: {replayer.failure}")


def note_failed_equivalence(model: nn.Module, reason: str) -> None:
    """Remember why no step of a call is captured; the next call tries again."""
    with _lock:
        _failed_equivalences[model] = reason


def counts(model: nn.Module) -> Counts:
    """What the model's calls so far have captured and replayed."""
    with _lock:
        return _counts.get(model, Counts())


@report.provides("replayed")
def replayed() -> dict[str, str]:
    """How many steps were replayed, or why none was, by class of the model."""
    with _lock:
        how = {type(model).__name__: f"{counts}{_kept(model)}" for model, counts in _counts.items()}
        reasons = [*_failed_equivalences.items(), *_failures.items()]
        return {**how, **{type(model).__name__: f"none, {reason}" for model, reason in reasons}}


def _kept(model: nn.Module) -> str:
    owners = [model, *filter(None, (_owners[model](),))] if model in _owners else [model]
    count, size = sum(map(store.count, owners)), sum(map(store.nbytes, owners))
    return f", {count} kept for later calls ({report.size(size)})" if count else ""


@keeper
def forget_failures() -> None:
    """Try models again whose steps could not be captured."""
    with _lock:
        _failures.clear()


def release() -> None:
    """Forget all outcomes: a model may be tried again."""
    with _lock:
        for record in (_counts, _owners, _failed_equivalences, _failures):
            record.clear()
