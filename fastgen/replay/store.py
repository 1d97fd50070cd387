"""Keeps captured steps between calls: the next call of the same shapes writes a prompt into their state.

A captured step reads and writes one state. Step and state are kept together, for the model; a call takes them out, so
that no other call uses them, and brings them back. If a call outgrows the buffers, the larger ones and the steps
captured on them are kept, too, and the next call moves to them. Steps captured after an eviction are not kept.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fastgen import config, locks
from fastgen.cache.tree import BeamTree
from fastgen.layers import precision
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits
from fastgen.memory.release import keeper
from fastgen.replay.replayer import Captured, Replayer

SOURCE_STEP = 16  # sources are padded to multiples of so many positions, so that like lengths share a recording

_MOST = 4  # recordings of a model
_SHARE = 16  # recordings take at most one part in so many of a GPU's memory


class State(Protocol):
    """The state that a step of the host reads and writes, besides the model and the inputs."""

    @property
    def products(self) -> LinearDispatcher: ...

    def fill(self, other: Any) -> None:
        """Begin anew, in place, with the prompt and the encoder output of another state of the same shapes."""

    def restore_first_buffers(self) -> None:
        """Return to the buffers that the state had before it grew or sentences left."""

    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Free the buffers."""


AnyState = TypeVar("AnyState", bound=State)


class Guards(Protocol):
    """Tells whether a model is still as it was when a step was captured."""

    is_complete: bool  # whether all that a step reads can be checked

    def is_current(self) -> bool: ...


@dataclass
class StoredGraph:
    """The captured steps of a call, by epoch, and their state."""

    state: Any  # a State of the host's own
    captured: dict[Any, Captured]


class _Kept:
    """A model's recordings, by the key that a call must share with them; the one used last comes last."""

    def __init__(self) -> None:
        self.recordings: OrderedDict[Hashable, StoredGraph] = OrderedDict()
        self.guards: Guards | None = None  # of the model as it was when the recordings were made

    def nbytes(self) -> int:
        return sum(recording.state.nbytes() for recording in self.recordings.values())

    def drop_oldest(self) -> None:
        self.recordings.popitem(last=False)[1].state.close()

    def close(self) -> None:
        while self.recordings:
            self.drop_oldest()
        self.guards = None


_lock = locks.reentrant_lock()  # reentrant: a model may die, and its recordings with it, anywhere
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def surroundings(device: torch.device) -> Hashable:
    """The settings of torch and fastgen that a step depends on; None where they cannot be told."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None  # somebody's mode sees each operation
    if torch.is_autocast_enabled(device.type):
        return None  # it casts weights once in a call, which a later replay would not do again
    return (
        config.current().packing,
        config.current().weights,
        # A call that takes over memory of another stream would have to wait for that stream.
        torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else torch.get_num_threads(),
        precision.of_products(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def take(model: nn.Module, key: Hashable) -> StoredGraph | None:
    """Take out the captured steps that fit a call like this; None if there are none.

    If the model has changed, all recordings of it are dropped: they may hold weights that it no longer has.
    """
    with _lock:
        kept = _kept.get(model)
        if kept is None or kept.guards is None:
            return None
        if not kept.guards.is_current():
            kept.close()
            return None
        return kept.recordings.pop(key, None)


def reuse_graph(model: nn.Module, key: Hashable, state: AnyState, replayer: Replayer) -> AnyState | None:
    """Take over a recording in place of `state`, a state before the first step, which is closed then.

    Returns the state of the recording, filled with what `state` held; `replayer` takes over the captured steps. Returns
    None, and does nothing, if there is no recording or a weight has changed of which the recording has a copy.
    """
    recording = take(model, key)
    if recording is None:
        return None
    kept: AnyState = recording.state
    if not kept.products.are_current(state.products):
        kept.close()
        return None
    kept.fill(state)
    state.close()
    replayer.resume(recording.captured)
    return kept


def retain_buffers(tree: BeamTree, replayer: Replayer, device: torch.device) -> None:
    """Let a call keep the buffers that it outgrows, as long as memory allows: see `BeamTree.retain_buffers`."""

    def fits(nbytes: int) -> bool:
        if not may_keep(nbytes, device):
            replayer.drop_retained()
        return replayer.retains_buffers

    replayer.retains_buffers = True
    tree.retain_buffers(replayer.has_captured, fits)


def drop_retained(tree: BeamTree, replayer: Replayer, search: Any) -> None:
    """Drop what the call keeps for later calls, also in `search`, if the search's steps are captured."""
    tree.retained.drop()
    replayer.drop_retained()
    if search is not None:
        search.drop_retained()


def recorded(state: Any, tree: BeamTree, replayer: Replayer) -> StoredGraph:
    """The steps captured by the call in epochs to which the tree of `state` will come back."""
    return StoredGraph(state, {epoch: its for epoch, its in replayer.captured.items() if tree.retained.has(epoch)})


def put(
    model: nn.Module, key: Hashable, recording: StoredGraph, look: Callable[[], Guards], device: torch.device
) -> None:
    """Keep captured steps for later calls, if the model can be checked completely; the call asked `take` first."""
    with _lock:
        kept = _kept.get(model)
        if kept is None:
            kept = _kept[model] = _Kept()
            weakref.finalize(model, kept.close).atexit = False
        if kept.guards is not None and not kept.guards.is_current():
            kept.close()  # the model has changed within the call: recordings made before are of another one
        if kept.guards is None:
            kept.guards = look()
        if not kept.guards.is_complete:
            kept.close()
            recording.state.close()
            return
        if (other := kept.recordings.pop(key, None)) is not None:  # put there by another thread
            other.state.close()
        while len(kept.recordings) >= _MOST:
            kept.drop_oldest()
        kept.recordings[key] = recording
        while kept.recordings and not may_keep(0, device):
            kept.drop_oldest()


def drop(model: nn.Module) -> None:
    """Drop all recordings of this model."""
    with _lock:
        if model in _kept:
            _kept[model].close()


def drop_some(model: nn.Module, is_meant: Callable[[Hashable], bool]) -> None:
    """Drop the recordings of this model whose key `is_meant`."""
    with _lock:
        if kept := _kept.get(model):
            for key in [key for key in kept.recordings if is_meant(key)]:
                kept.recordings.pop(key).state.close()


def may_keep(more: int, device: torch.device) -> bool:
    """Whether `more` bytes may be kept on this device besides those kept already."""
    taken = nbytes() + more
    if device.type != "cuda":
        return limits.may_keep(0, taken)
    return taken * _SHARE <= torch.cuda.get_device_properties(device).total_memory


def count(model: nn.Module) -> int:
    """How many recordings are kept for the model."""
    with _lock:
        return len(_kept[model].recordings) if model in _kept else 0


def nbytes(model: nn.Module | None = None) -> int:
    """Bytes that the states of kept recordings take, by default of all models."""
    with _lock:
        return sum(kept.nbytes() for key, kept in _kept.items() if model in (None, key))


@keeper
def release() -> None:
    """Drop all recordings."""
    with _lock:
        for kept in _kept.values():
            kept.close()
