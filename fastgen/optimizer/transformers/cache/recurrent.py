"""Recurrent states beside the tree: one row per beam, as the host keeps them, reordered in place.

Keys and values of a token stay what they are, so beams can share them. A recurrent state holds all of a beam's past.
States are small, and a step that is replayed finds them where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from fastgen import phases

__phase__ = phases.CACHE


class _Absent:
    """Stands for a class that this version of the host does not have."""


StateLayer: Any = getattr(cache_utils, "LinearAttentionLayer", _Absent)
_ALONE = (StateLayer, getattr(cache_utils, "DummyLayer", _Absent))  # these hold no keys
# A recurrent layer and attention side by side.
_HYBRIDS = tuple(
    getattr(cache_utils, f"LinearAttentionAnd{name}AttentionLayer", _Absent) for name in ("Full", "SlidingWindow")
)


def has_no_keys(layer: Any) -> bool:
    """Whether this layer of the host's stays as it is beside the tree's layers."""
    return type(layer) in _ALONE


def is_hybrid(layer: Any) -> bool:
    """Whether a layer holds recurrent states beside keys and values."""
    return type(layer) in _HYBRIDS


def is_known(layer: Any) -> bool:
    """Whether the states of a layer are where this module looks for them."""
    return (has_no_keys(layer) or is_hybrid(layer)) and isinstance(getattr(layer, "conv_states", {}), dict)


def _states(layers: Iterable[Any]) -> Iterator[tuple[dict[int, Any], int]]:
    for layer in layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            yield from ((states, number) for number, state in states.items() if state is not None)


def select(layers: Iterable[Any], rows: Tensor) -> None:
    """Replace the states by these rows of them, int64 `[rows']`; a row may come several times."""
    for states, number in _states(layers):
        states[number] = states[number].index_select(0, rows)


def reorder(layers: Iterable[Any], rows: Tensor) -> None:
    """The same in place, for as many rows as there are."""
    for states, number in _states(layers):
        states[number].copy_(states[number].index_select(0, rows))


def saved(layers: Iterable[Any]) -> Callable[[], None]:
    """Copy the states, and return what puts them back: a step changes them by what they were."""
    kept = [(states, number, states[number], states[number].clone()) for states, number in _states(layers)]

    def put_back() -> None:
        for states, number, state, copy in kept:
            states[number] = state.copy_(copy)

    return put_back


def nbytes(layers: Iterable[Any]) -> int:
    return sum(states[number].nbytes for states, number in _states(layers))


def with_keys(layer: Any, states: Any, gathered: Any) -> Any:
    """The host's `layer`, which was empty, with the states of `states` and with gathered keys and values."""
    for name, value in vars(states).items():
        if name in vars(layer) and name not in ("keys", "values", "dtype", "device"):
            setattr(layer, name, value)
    layer.keys, layer.values = gathered.keys, gathered.values
    layer.dtype, layer.device, layer.is_initialized = gathered.dtype, gathered.device, True
    if hasattr(gathered, "cumulative_length"):
        layer.cumulative_length = gathered.cumulative_length
    return layer


def rows_of(sentences: Tensor, beams: int) -> Tensor:
    """The rows of these sentences, int64 `[B']` -> `[B'*M]`."""
    return (sentences[:, None] * beams + torch.arange(beams, device=sentences.device)).flatten()
