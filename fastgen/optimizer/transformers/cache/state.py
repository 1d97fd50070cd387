"""What the results of a model depend on besides its inputs, as one value: results kept for one never serve another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fastgen import config
from fastgen.layers import fingerprints, precision
from fastgen.optimizer.transformers.model import facts

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def state_of(model: Any, part: nn.Module, known: facts.ModelFacts) -> Hashable:
    """A value that changes with any number in `part` of a model, and with all else that its results depend on.

    Looking for edits reads all weights once: see `fastgen.layers.fingerprints`. `known`: the facts of the model.
    """
    weights = list(weights_of(part))
    settings = config.current().weights, precision.of_products(), *(_place(weight.device) for weight in weights[:1])
    return type(part), fingerprints.states_of(weights), _attributes(model, known), settings


def _place(device: torch.device) -> Hashable:
    """A device; on a GPU with the stream, as work on another may run before what it reads has been written."""
    return str(device), torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def weights_of(part: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    yield from part.parameters()
    yield from part.buffers()


def are_plain(part: nn.Module) -> bool:
    """Whether all weights are torch's own dense tensors, whose bits say what they are."""
    kinds = {(type(weight) in (Tensor, nn.Parameter), weight.layout) for weight in weights_of(part)}
    return kinds <= {(True, torch.strided)}


def _attributes(model: nn.Module, known: facts.ModelFacts) -> Hashable:
    """What says that the model's attributes, its configuration and its code are the same."""
    if facts.are_guarded(model, known):
        return known.identity
    # Something guards cannot see through, such as adapters: their numbers, names and switches say which are active.
    return tuple((name, type(module), _plain(vars(module))) for name, module in model.named_modules())


def _plain(value: Any, depth: int = 0) -> Hashable:
    """An attribute's value in parts that can be compared; others, such as functions, are told by what they are."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, PretrainedConfig):
        return _plain(vars(value), depth)
    if isinstance(value, Tensor):
        return fingerprints.state_of(value)
    if isinstance(value, nn.Module) or depth > 4:
        return id(value)
    if isinstance(value, Mapping):
        return tuple((_plain(name), _plain(item, depth + 1)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_plain(item, depth + 1) for item in value)
    return type(value), id(value)
