"""Slim caches for the host's attention modules.

The modules hand keys and values to the cache, already projected. So while a session runs, the layers that project to
them note their input, which the cache then stores, and in a step return nothing but a tensor of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastgen import config
from fastgen.cache.slim import Choice, Projections, Slim
from fastgen.decoding.watched import is_watched
from fastgen.optimizer.transformers import modules
from fastgen.products import Products

# Classes of attention without rotary positions, normalised keys or clipping -> the layers that make keys and values.
_SEPARATE = {
    **dict.fromkeys(
        """BartAttention BlenderbotAttention M2M100Attention MBartAttention MarianAttention OPTAttention
        PegasusAttention Speech2TextAttention WhisperAttention""".split(),
        ("k_proj", "v_proj"),
    ),
    **dict.fromkeys(("MT5Attention", "T5Attention", "UMT5Attention"), ("k", "v")),
}
_FUSED = {"GPT2Attention": "c_attn"}  # one layer makes queries, keys and values or, of a source, keys and values


class Noted(NamedTuple):
    """A layer's cache is about to be updated with what its input, `[rows, P, C]`, is projected to."""

    module: nn.Module  # the attention
    slim: Slim
    rows: Tensor


@dataclass
class SlimCaches:
    """Those of one session."""

    choice: Choice
    source: Tensor | None = None  # the encoder's output, [B, N, C]; None until the prompt is read
    prompt_tokens: int = 0
    is_stepping: bool = False
    noted: Noted | None = None
    _of_source: dict[nn.Module, Slim] = field(default_factory=dict)  # by attention module

    def install(self, model: Any, products: Products) -> None:
        """See to the projections of the model's decoder, if any cache is to be slim."""
        for module in attention_modules(model) if self.choice != Choice() else ():
            slim = Slim(projections_of(module))
            if (name := _FUSED.get(type(module).__name__)) is not None:
                products.put_instead(getattr(module, name), _Fused(self, module, slim))
            else:
                keys, values = (getattr(module, name) for name in _SEPARATE[type(module).__name__])
                products.put_instead(keys, _Keys(self, module, slim))
                products.put_instead(values, _Values(self, module, slim))

    def hides(self, rows: Tensor, slim: Slim) -> bool:
        """Whether nobody needs the keys and values of a layer with this input, only their shape."""
        # A long prompt attends to the source faster by keys and values that are dropped again.
        is_few = self.prompt_tokens < slim.projections.key.shape[1]
        return is_few if rows is self.source else self.is_stepping

    def covers(self, rows: Tensor) -> bool:
        """Whether a layer with this input has a slim cache."""
        return self.choice.source if rows is self.source else self.choice.own

    def take(self) -> Noted:
        """What has been noted for this update of a cache."""
        noted, self.noted = self.noted, None
        assert noted is not None, "a slim layer's cache was updated without its projections"
        return noted

    def attend_to_source(self, module: nn.Module, slim: Slim) -> None:
        """From now on this attention module has no keys and values of the source, but the source itself."""
        self._of_source[module] = slim

    def seen_source(self) -> Tensor:
        """The source, which somebody attends to."""
        assert self.source is not None
        return self.source

    def of_source(self, module: nn.Module) -> Slim | None:
        """How this attention module attends to the source itself; None if it has keys and values."""
        return self._of_source.get(module)


class _Instead:
    """In place of the products of an attention's projections."""

    def __init__(self, caches: SlimCaches, module: nn.Module, slim: Slim) -> None:
        self.caches, self.module, self.slim = caches, module, slim


class _Keys(_Instead):
    def __call__(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        caches = self.caches
        if not caches.covers(rows):
            return product()
        caches.noted = Noted(self.module, self.slim, rows)
        return _of_shape(rows, self.slim.projections.key) if caches.hides(rows, self.slim) else product()


class _Values(_Instead):
    def __call__(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        is_hidden = self.caches.covers(rows) and self.caches.hides(rows, self.slim)
        return _of_shape(rows, self.slim.projections.value) if is_hidden else product()


class _Fused(_Instead):
    def __call__(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        caches, projections = self.caches, self.slim.projections
        if not caches.covers(rows):
            return product()
        caches.noted = Noted(self.module, self.slim, rows)
        if not caches.hides(rows, self.slim):
            return product()
        hidden = _of_shape(rows, projections.key), _of_shape(rows, projections.value)
        if rows is caches.source:
            return torch.cat(hidden, dim=-1)
        layer: Any = getattr(self.module, _FUSED[type(self.module).__name__])
        size = layer.weight.shape[1] - sum(each.shape[-1] for each in hidden)
        queries = torch.addmm(layer.bias[:size], rows.flatten(0, -2), layer.weight[:, :size])
        return torch.cat((queries.unflatten(0, rows.shape[:-1]), *hidden), dim=-1)


def _of_shape(rows: Tensor, weight: Tensor) -> Tensor:
    """Zeros of the shape of a product with `weight`, `[H, D, C]`, that take no memory."""
    return rows.new_zeros(1).expand(*rows.shape[:-1], weight.shape[0] * weight.shape[1])


def attention_modules(model: Any) -> Iterator[nn.Module]:
    """Those of the decoder that can have a slim cache."""
    for module in modules.of_steps(model):
        if type(module).__name__ in _SEPARATE.keys() | _FUSED.keys() and not _misfit(module):
            yield module


def unsupported_reason(model: Any) -> str | None:
    """Why no layer of this model can have a slim cache, or None."""
    if not modules.is_tested(model):
        return f"{type(model).__name__} is none of the models whose slim caches have been compared with stock"
    if config.current().compile:
        return "compiled steps have caches of keys and values"
    if torch.is_autocast_enabled(model.device.type):
        return "what autocast rounds are keys and values"
    if is_watched(modules.of_steps(model)):
        return "something of yours looks at the model's modules, or has replaced them"
    if not any(True for _ in attention_modules(model)):
        return _WHY_NOT
    return None


_WHY_NOT = "keys and values of its attention are not plain projections of the layer's input (rotary positions, say)"


def _misfit(module: Any) -> bool:
    """Whether this module's keys and values are other than those of its class."""
    plain = all(type(layer) in (nn.Linear, Conv1D) and type(layer.weight) is nn.Parameter for layer in _layers(module))
    return not plain or getattr(module, "reorder_and_upcast_attn", False)


def _layers(module: Any) -> list[Any]:
    name = type(module).__name__
    names = (_FUSED[name],) if name in _FUSED else _SEPARATE[name]
    return [getattr(module, name) for name in names]


def projections_of(module: Any) -> Projections:
    """Views of the weights, of which a later change is seen."""
    layers = _layers(module)
    if type(module).__name__ in _FUSED:
        layer, size = layers[0], module.head_dim
        # [C, (3 or 2) * H * D], the queries' first
        keys, values = layer.weight.unflatten(1, (-1, module.num_heads, size)).permute(1, 2, 3, 0)[-2:]
        key_bias, value_bias = layer.bias.view(-1, module.num_heads, size)[-2:]
        return Projections(keys, values, key_bias, value_bias)
    size = getattr(module, "head_dim", None) or module.key_value_proj_dim
    keys, values = (layer.weight.unflatten(0, (-1, size)) for layer in layers)
    key_bias, value_bias = (None if layer.bias is None else layer.bias.unflatten(0, (-1, size)) for layer in layers)
    return Projections(keys, values, key_bias, value_bias)
