"""What a user may do to a model between two calls, as plain data; done alike to any copy of the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import fastgen


def drawn_edit(draw: random.Random) -> dict[str, Any]:
    return {"edit": draw.choice(list(_EDITS)), "place": draw.randrange(10**6), "value": draw.choice([0.8, 0.95, 1.1])}


def edited(model: Any, edit: dict[str, Any]) -> None:
    """Do it."""
    with torch.no_grad():
        _EDITS[edit["edit"]](model, edit["place"], edit["value"])


def _weight(model: Any, place: int) -> Any:
    weights = list(model.parameters())
    return weights[place % len(weights)]


def _in_place(model: Any, place: int, value: float) -> None:
    _weight(model, place).mul_(value)


def _by_data(model: Any, place: int, value: float) -> None:
    _weight(model, place).data.mul_(value)


def _other_data(model: Any, place: int, value: float) -> None:
    weight = _weight(model, place)
    weight.data = weight.data * value


def _permuted(model: Any, place: int, value: float) -> None:
    """The rows of a matrix change places, as when heads do: sum and norm stay what they are."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    weight = matrices[place % len(matrices)]
    weight.copy_(weight.flip(0))


def _replaced(model: Any, place: int, value: float) -> None:
    """Another parameter object in a linear layer."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if layers:
        layer = layers[place % len(layers)]
        layer.weight = torch.nn.Parameter(layer.weight * value, requires_grad=False)


def _hooked(model: Any, place: int, value: float) -> None:
    modules = list(model.modules())

    def scale(module: Any, inputs: Any, output: Any) -> Any:
        return output * value if isinstance(output, torch.Tensor) and output.is_floating_point() else None

    handles = model.__dict__.setdefault("_soak_hooks", [])
    handles.append(modules[place % len(modules)].register_forward_hook(scale))


def _unhooked(model: Any, place: int, value: float) -> None:
    for handle in model.__dict__.pop("_soak_hooks", []):
        handle.remove()


def _configured(model: Any, place: int, value: float) -> None:
    config = model.generation_config
    name, setting = [("repetition_penalty", 1 + value / 4), ("length_penalty", value), ("top_k", 9)][place % 3]
    setattr(config, name, setting)


def _other_attention(model: Any, place: int, value: float) -> None:
    now = model.config._attn_implementation
    model.set_attn_implementation("eager" if now == "sdpa" else "sdpa")


def _other_dtype(model: Any, place: int, value: float) -> None:
    model.to([torch.float64, torch.float32, torch.bfloat16][place % 3])


def _thread_count(model: Any, place: int, value: float) -> None:
    torch.set_num_threads(1 + place % 2)


_EDITS: dict[str, Callable[[Any, int, float], None]] = {
    "weight in place": _in_place,
    "weight by .data": _by_data,
    "other .data": _other_data,
    "permuted rows": _permuted,
    "other parameter": _replaced,
    "hook added": _hooked,
    "hooks removed": _unhooked,
    "generation config": _configured,
    "attention": _other_attention,
    "dtype": _other_dtype,
    "train": lambda model, place, value: model.train(),
    "eval": lambda model, place, value: model.eval(),
    "threads": _thread_count,
    "release": lambda model, place, value: fastgen.release(),
}
