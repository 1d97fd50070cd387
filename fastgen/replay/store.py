"""Captured steps that outlive their call: the next call of the same shapes puts its prompt where they look for it.

A captured step reads and writes a state of its own. It is kept with it, by the model; a call takes it out, so that
nobody else has it, and brings it back. Where a call outgrows its buffers, the larger ones and the step captured there
are kept too, and the next call moves to them; what is captured after sentences have left is of that call alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fastgen import config
from fastgen.cache.tree import BeamTree
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import limits
from fastgen.memory.release import keeper
from fastgen.replay.replayer import Captured, Replayer

SOURCE_STEP = 16  # a source is padded to a multiple of so many positions, for like lengths to share a recording

_MOST = 4  # of a model
_SHARE = 16  # of a GPU's memory, what is kept takes one part in so many


class State(Protocol):
    """What a step of the host reads and writes besides the model and its inputs."""

    @property
    def products(self) -> LinearDispatcher: ...

    def fill(self, other: Any) -> None:
        """Begin anew, in place, with the prompt and the source of another state of the same shapes."""

    def restore_first_buffers(self) -> None:
        """Have the buffers again that it had before it grew or sentences left."""

    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Free them."""


AnyState = TypeVar("AnyState", bound=State)


class Guards(Protocol):
    """What the model was when its step was captured."""

    is_complete: bool  # whether anything could have been overlooked

    def is_current(self) -> bool: ...


@dataclass
class StoredGraph:
    """The captured steps of a call, by epoch, and their state."""

    state: Any  # a State of the host's own
    captured: dict[Hashable, Captured]


class _Kept:
    """A model's recordings, by what a call must have in common with them; the one used last comes last."""

    def __init__(self) -> None:
        self.recordings: OrderedDict[Hashable, StoredGraph] = OrderedDict()
        self.guards: Guards | None = None  # of the model as it was when they were made

    def nbytes(self) -> int:
        return sum(recording.state.nbytes() for recording in self.recordings.values())

    def drop_oldest(self) -> None:
        self.recordings.popitem(last=False)[1].state.close()

    def close(self) -> None:
        while self.recordings:
            self.drop_oldest()
        self.guards = None


_lock = threading.RLock()  # reentrant: a model may die, and its recordings with it, anywhere
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def surroundings(device: torch.device) -> Hashable:
    """What a step depends on beside the model and its state; None where that cannot be told."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None  # somebody's mode sees each operation
    return (
        config.current().packing,
        # Who continues another stream's memory would have to wait for it.
        torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def take(model: nn.Module, key: Hashable) -> StoredGraph | None:
    """Take out the captured steps that fit a call like this; None if there are none.

    If the model has changed, all of its recordings are dropped: they may hold weights that it has no longer.
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
    """Go on with one in place of `state`, which is as it is before the first step and is closed then.

    Returns the state kept with it, filled with what `state` held; `replayer` goes on with its steps. None, and nothing
    done, if there is none or a weight has changed that its products have a copy of.
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
    """Let a call keep what it outgrows, as long as there is room for it: see `BeamTree.retain_buffers`."""

    def fits(nbytes: int) -> bool:
        if not may_keep(nbytes, device):
            replayer.drop_retained()
        return replayer.retains_buffers

    replayer.retains_buffers = True
    tree.retain_buffers(replayer.has_captured, fits)


def drop_retained(tree: BeamTree, replayer: Replayer, search: Any) -> None:
    """The call keeps nothing any longer, its `search` neither, if it has one whose steps are captured."""
    tree.retained.drop()
    replayer.drop_retained()
    if search is not None:
        search.drop_retained()


def recorded(state: Any, tree: BeamTree, replayer: Replayer) -> StoredGraph:
    """What the call has captured in memory to which the tree of its `state` comes back."""
    return StoredGraph(state, {epoch: its for epoch, its in replayer.captured.items() if tree.retained.has(epoch)})


def put(
    model: nn.Module, key: Hashable, recording: StoredGraph, look: Callable[[], Guards], device: torch.device
) -> None:
    """Keep captured steps for later calls, if all of the model can be looked at again; the call asked `take` first."""
    with _lock:
        kept = _kept.get(model)
        if kept is None:
            kept = _kept[model] = _Kept()
            weakref.finalize(model, kept.close).atexit = False
        if kept.guards is None:
            kept.guards = look()
        if not kept.guards.is_complete:
            kept.close()
            recording.state.close()
            return
        if (other := kept.recordings.pop(key, None)) is not None:  # another thread's
            other.state.close()
        while len(kept.recordings) >= _MOST:
            kept.drop_oldest()
        kept.recordings[key] = recording
        while kept.recordings and not may_keep(0, device):
            kept.drop_oldest()


def drop(model: nn.Module) -> None:
    """Keep none of this model's any longer."""
    with _lock:
        if model in _kept:
            _kept[model].close()


def may_keep(more: int, device: torch.device) -> bool:
    """Whether so many bytes may be kept on this device besides what is."""
    taken = nbytes() + more
    if device.type != "cuda":
        return limits.may_keep(0, taken)
    return taken * _SHARE <= torch.cuda.get_device_properties(device).total_memory


def count(model: nn.Module) -> int:
    """How many are kept for the model."""
    with _lock:
        return len(_kept[model].recordings) if model in _kept else 0


def nbytes(model: nn.Module | None = None) -> int:
    """The memory that the states of kept ones take, of all models by default."""
    with _lock:
        return sum(kept.nbytes() for key, kept in _kept.items() if model in (None, key))


@keeper
def release() -> None:
    """Keep none any longer."""
    with _lock:
        for kept in _kept.values():
            kept.close()
