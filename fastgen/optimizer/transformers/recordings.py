"""Recorded steps that outlive their call: the next call of the same shapes puts its prompt where they look for it.

A recording reads and writes a tree, a cache and a source of its own. They are kept with it, by the model; a call takes
them out, so that nobody else has them, and brings them back.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import config, memory
from fastgen.cache.tree import BeamTree
from fastgen.decoding.replay import Captured
from fastgen.optimizer.transformers.session import Session
from fastgen.optimizer.transformers.unchanged import Snapshot

_MOST = 4  # of a model


@dataclass
class State:
    """What the steps of a call read and write, besides the model and the inputs of each step."""

    tree: BeamTree
    session: Session
    cache: Any  # the tree under the host's names, and cross-attention's keys and values
    encoder_outputs: Any
    source_mask: Tensor | None  # [B, N]
    finished_mask: tuple[Tensor, Tensor] | None  # that mask, and what the model is given in its place

    def fill(self, other: State) -> None:
        """Begin anew, in place, with the prompt and the source of a state of the same `shape`."""
        self.tree.replant(other.tree)
        for mine, theirs in zip(self._source(), other._source(), strict=True):
            mine.copy_(theirs)
        if self.source_mask is not None:
            self.session.change_source(self.source_mask[:, None, None].bool())

    def shape(self) -> Hashable:
        """What states must have in common for one to be filled with the other."""
        tree = self.tree
        tensors = [*self._source(), *(tensor for layer in tree.layers for tensor in layer.stored())]
        return (
            (tree.batch, tree.beams, tree.max_steps, tree.capacity, tree.prompt_length, tree.epoch),
            tuple(layer.window for layer in tree.layers),
            tuple((tensor.shape, tensor.dtype, tensor.device, tensor.is_inference()) for tensor in tensors),
            self.source_mask is None,
        )

    def _source(self) -> list[Tensor]:
        """Of the source, all that a step may read: the encoder's output, its mask, its keys and values."""
        source = [] if self.encoder_outputs is None else [*self.encoder_outputs.values()]
        source += [] if self.source_mask is None else [self.source_mask]
        cross = getattr(self.cache, "cross_attention_cache", None)
        return source + [x for layer in (cross.layers if cross else ()) for x in (layer.keys, layer.values)]

    def nbytes(self) -> int:
        tensors = [*self._source(), *(tensor for layer in self.tree.layers for tensor in layer.stored())]
        return sum(tensor.nbytes for tensor in tensors)

    def close(self) -> None:
        """Let go of all keys and values: there are cycles, and memory is not to wait for the garbage collector."""
        self.tree.close()
        if hasattr(self.cache, "close"):
            self.cache.close()


@dataclass
class Recording:
    """A recorded step with its state."""

    state: State
    captured: Captured
    snapshot: Snapshot

    def is_current(self, session: Session) -> bool:
        """Whether the model still is what was recorded. `session`: of a call that has read its prompt."""
        return self.snapshot.is_current() and self.state.session.products.are_current(session.products)


class _Kept:
    """A model's recordings, by what a call must have in common with them; the one used last comes last."""

    def __init__(self) -> None:
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()

    def nbytes(self) -> int:
        return sum(recording.state.nbytes() for recording in self.recordings.values())

    def close(self) -> None:
        while self.recordings:
            self.recordings.popitem(last=False)[1].state.close()


_lock = threading.RLock()  # reentrant: a model may die, and its recordings with it, anywhere
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


def key_of(state: State) -> Hashable:
    """What a call must have in common with another to replay its steps; None if it may with none."""
    outputs = state.encoder_outputs
    if outputs is not None and not (isinstance(outputs, dict) and all(map(torch.is_tensor, outputs.values()))):
        return None  # of all layers, for a user who has asked for them
    device = state.tree.ancestry().device
    return (
        state.shape(),
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


def take(model: nn.Module, key: Hashable, session: Session) -> Recording | None:
    """One for a call like this, now its own; None if there is none, or the model has changed since."""
    with _lock:
        kept = _kept.get(model)
        recording = kept.recordings.pop(key, None) if kept else None
    if recording is not None and not recording.is_current(session):
        recording.state.close()
        return None
    return recording


def keep(model: nn.Module, key: Hashable, recording: Recording) -> None:
    """For later calls."""
    with _lock:
        kept = _kept.get(model)
        if kept is None:
            kept = _kept[model] = _Kept()
            weakref.finalize(model, kept.close).atexit = False
        if (other := kept.recordings.pop(key, None)) is not None:  # another thread's
            other.state.close()
        kept.recordings[key] = recording
        while len(kept.recordings) > _MOST or (kept.recordings and not _may_keep(recording)):
            kept.recordings.popitem(last=False)[1].state.close()


def _may_keep(recording: Recording) -> bool:
    taken = nbytes()
    device = recording.state.tree.ancestry().device
    if device.type != "cuda":
        return memory.may_keep(0, taken)
    return taken * _SHARE <= torch.cuda.get_device_properties(device).total_memory


_SHARE = 16  # of a GPU's memory, what is kept takes one part in so many


def count(model: nn.Module) -> int:
    """How many are kept for the model."""
    with _lock:
        return len(_kept[model].recordings) if model in _kept else 0


def nbytes() -> int:
    """What the kept ones take, besides what they have in common with the model."""
    with _lock:
        return sum(kept.nbytes() for kept in _kept.values())


def release() -> None:
    """Keep none any longer."""
    with _lock:
        for kept in _kept.values():
            kept.close()
