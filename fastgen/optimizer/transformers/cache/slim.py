"""Slim caches for transformers' attention modules.

The host's modules give the cache keys and values, already projected. So while a session runs, the key and value
projections note what the cache has to store instead, and those whose result is not needed return an empty shape.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastgen.cache.slim.latent import Projections, Slim
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.families import ATTENTIONS
from fastgen.optimizer.transformers.interception import Wrapper
from fastgen.optimizer.transformers.model import modules
from fastgen.optimizer.transformers.model.facts import facts_of
from fastgen.optimizer.transformers.versions import FINDS_EAGER


class Noted(NamedTuple):
    """The vectors with which a layer's cache is to be updated next, in place of keys and values."""

    module: nn.Module  # the attention module
    slim: Slim
    rows: Tensor  # [rows, P, C]


@dataclass(frozen=True)
class LayerCaches:
    """The slim caches of one attention module; None: keys and values are stored."""

    self_attn: Slim | None = None
    cross_attn: Slim | None = None


@dataclass
class SlimCaches:
    """The slim caches of one session."""

    is_needed: bool = False  # by any layer
    source: Tensor | None = None  # the encoder output, [B, N, C], if it is needed; None until the prompt is read
    prompt_tokens: int = 0
    is_stepping: bool = False
    noted: Noted | None = None
    rotation: tuple[Tensor, Tensor] | None = None  # cosine and sine, [rows or 1, P, R], of the current forward pass
    _is_rotation_stored: bool = False
    _source_layers: dict[nn.Module, Any] = field(default_factory=dict)  # with slim caches, by attention module

    def install(self, layer_caches: Mapping[nn.Module, LayerCaches], products: LinearDispatcher) -> None:
        """Override the key and value projections of these attention modules."""
        self.is_needed = True
        for module, its in layer_caches.items():
            attention = _Attention(self, module, its)
            if (known := ATTENTIONS[type(module).__name__]).is_fused:
                products.override(getattr(module, known.keys), attention.fused)
            else:
                keys, values = projecting_layers(module)
                products.override(keys, attention.keys)
                products.override(values, attention.values)

    def take(self, states: tuple[Tensor, Tensor]) -> Tensor:
        """What this update of a cache stores for these keys and values, `[rows, 1, P, C]`."""
        assert self.noted is not None, "a slim layer's cache was updated without its projections"
        (_, slim, rows), self.noted = self.noted, None
        if getattr(slim, "is_stored_rotated", False):
            return states[0].transpose(1, 2).flatten(2)[:, None]
        return rows[:, None]

    def rotate(self, tree: BeamTree) -> None:
        """Store the rotation of the positions of the current forward pass, once for all layers."""
        if self._is_rotation_stored:
            return
        assert self.rotation is not None, "a rotary layer was called without its rotation"
        rows = tree.batch * (tree.beams if tree.steps else 1)
        stored = [each.expand(rows, -1, -1)[:, None] for each in self.rotation]  # [rows, 1, P, R]
        if tree.rotations is None:
            tree.rotations = TreeLayer(tree)
        if tree.steps:
            tree.rotations.append(*stored)
        else:
            tree.rotations.prefill(*stored)
        self._is_rotation_stored = True

    def note_rotation(self, rotation: tuple[Tensor, Tensor]) -> None:
        """Note the rotation of a forward pass, whose layers all get the same object."""
        if self.rotation is not rotation:
            self.rotation, self._is_rotation_stored = rotation, False

    def attend_by(self, layer: Any) -> None:
        """From now on the attention module of this cache layer attends to what the layer stores."""
        self._source_layers[layer.module] = layer

    def seen_source(self) -> Tensor:
        """The encoder output; an error if there is none."""
        assert self.source is not None
        return self.source

    def source_layer(self, module: nn.Module) -> Any:
        """The cross-attention cache layer of this module if it has a slim cache, else None."""
        return self._source_layers.get(module)

    def encoded_layer(self, module: nn.Module) -> Any:
        """The cache layer of this module if the prompt, too, attends to the encoder output itself; else None."""
        layer = self.source_layer(module)
        return layer if layer is not None and self.reads_encoded(layer.slim) else None

    def reads_encoded(self, slim: Slim) -> bool:
        """Whether the prompt, too, attends to the encoder output itself: for a long prompt it is faster to project keys
        and values, and drop them again."""
        return slim.kind == "x" and self.prompt_tokens < slim.projections.key.shape[1]


class _Attention:
    """Replaces the products of one attention module's key and value projections."""

    def __init__(self, caches: SlimCaches, module: nn.Module, layer_caches: LayerCaches) -> None:
        self._caches, self._module, self._layer_caches = caches, module, layer_caches
        self._layer: Any = getattr(module, ATTENTIONS[type(module).__name__].keys)

    def keys(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        if (slim := self._slim(rows)) is None:
            return product()
        keys = product() if self._shows(slim, rows, "k") else _of_shape(rows, slim.projections.key)
        if slim.kind != "v":
            self._note(slim, keys if slim.kind == "k" else rows)  # with "h" the first layer stores them
        return keys

    def values(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        if (slim := self._slim(rows)) is None:
            return product()
        values = product() if self._shows(slim, rows, "v") else _of_shape(rows, slim.projections.value)
        if slim.kind == "v":
            self._note(slim, values)
        return values

    def fused(self, rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
        if (slim := self._slim(rows)) is None:
            return product()
        projections = [slim.projections.key, slim.projections.value]
        sizes = [weight.shape[0] * weight.shape[1] for weight in projections]
        weight = self._layer.weight if isinstance(self._layer, Conv1D) else self._layer.weight.t()  # [in, out]
        sizes.insert(0, weight.shape[1] - sum(sizes))  # the queries' size, 0 in cross-attention
        shown = [True, *(self._shows(slim, rows, which) for which in "kv")]
        if all(shown):
            output = product()
            parts = list(output.split(sizes, dim=-1))
        else:
            biases = [None] * 3 if self._layer.bias is None else self._layer.bias.split(sizes)
            weights = [None, *projections]
            parts = [
                F.linear(rows, part.t(), bias) if is_shown else _of_shape(rows, of)
                for part, bias, is_shown, of in zip(weight.split(sizes, dim=1), biases, shown, weights, strict=True)
            ]
            output = torch.cat(parts, dim=-1)
        self._note(slim, {"k": parts[1], "v": parts[2]}.get(slim.kind, rows))
        return output

    def _slim(self, rows: Tensor) -> Slim | None:
        return self._layer_caches.cross_attn if rows is self._caches.source else self._layer_caches.self_attn

    def _shows(self, slim: Slim, rows: Tensor, which: str) -> bool:
        """Whether the keys ("k"), or the values ("v"), of these rows are needed."""
        if rows is self._caches.source:
            return not self._caches.reads_encoded(slim)
        return not self._caches.is_stepping or slim.kind == which

    def _note(self, slim: Slim, rows: Tensor) -> None:
        self._caches.noted = Noted(self._module, slim, rows)


def _of_shape(rows: Tensor, weight: Any) -> Tensor:
    """Zeros in the shape of a product with `weight`, `[H, D, C]`, expanded so that they take no memory."""
    return rows.new_zeros(1).expand(*rows.shape[:-1], weight.shape[0] * weight.shape[1])


def rotary_seams(attentions: Iterable[nn.Module]) -> dict[tuple[type, str], Wrapper]:
    """Wrappers, by class and attribute, that note the rotation passed to these attention modules."""
    owners = {type(module) for module in attentions if is_rotary(module)}
    return {(owner, "forward"): _noting_rotation for owner in owners}


def _noting_rotation(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def attention(self: Any, *args: Any, **kwargs: Any) -> Any:
        session, rotation = interception.current(), kwargs.get("position_embeddings")
        if session is not None and rotation is not None:
            session.slim.note_rotation(rotation)
        return forward(self, *args, **kwargs)

    return attention


def is_rotary(module: nn.Module) -> bool:
    """Whether this attention module rotates its keys."""
    known = ATTENTIONS.get(type(module).__name__)
    return known is not None and known.is_rotary


def unsupported_kind(module: nn.Module, kind: str) -> str | None:
    """Why this attention module, one of `attention_modules`, cannot have such a cache, apart from exactness."""
    if kind != "k" and is_rotary(module):
        return "its keys are rotated by their position"
    if kind != "x" and len(projections_of(module).key) < heads_of(module):
        return "several query heads share a key head, so that keys and values hold less than the layer's input"
    return None


def attention_modules(model: Any) -> Iterator[nn.Module]:
    """The decoder's attention modules that can have a slim cache of some kind."""
    found = [m for m in modules.decoder_modules(model) if type(m).__name__ in ATTENTIONS]
    if not found:
        return
    # A projection must not be shared with another attention module, nor with the queries.
    times = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for module in found:
        if not _misfit(module) and all(times[id(layer)] == 1 for layer in projecting_layers(module)):
            yield module


def unsupported_reason(model: Any) -> str | None:
    """Why no layer of this model can have a slim cache, or None."""
    if not FINDS_EAGER:
        return "this version of transformers has not been tried with slim caches"
    facts = facts_of(model)
    if not facts.is_tested:
        return f"{type(model).__name__} is none of the models whose slim caches have been compared with stock"
    if torch.is_autocast_enabled(model.device.type):
        return "what autocast rounds are keys and values"
    if facts.is_watched:
        return "something of yours looks at the model's modules, or has replaced them"
    if not any(True for _ in attention_modules(model)):
        return "keys and values of its attention are more than projections of the layer's input"
    return None


def _misfit(module: Any) -> bool:
    """Whether this module makes keys and values otherwise than its class does."""
    layers = projecting_layers(module)
    plain = all(type(layer) in (nn.Linear, Conv1D) and type(layer.weight) is nn.Parameter for layer in layers)
    clips = getattr(getattr(module, "config", None), "clip_qkv", None) is not None
    return not plain or clips or getattr(module, "reorder_and_upcast_attn", False)


def heads_of(module: Any) -> int:
    """The number of query heads of an attention module."""
    names = ("num_heads", "n_heads")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None) or (
        module.config.num_attention_heads
    )


def projecting_layers(module: Any) -> list[Any]:
    """The linear layers that make an attention module's keys and values."""
    known = ATTENTIONS[type(module).__name__]
    return [getattr(module, name) for name in dict.fromkeys((known.keys, known.values))]


def projections_of(module: Any) -> Projections:
    """Views of the key and value projections' weights, which follow later changes."""
    layers = projecting_layers(module)
    size = getattr(module, "head_dim", None) or module.key_value_proj_dim
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if len(layers) == 1:
        weight = weights[0].t() if isinstance(layers[0], Conv1D) else weights[0]  # [(Q + 2 * Hkv) * D, C]
        groups = getattr(module, "num_key_value_groups", 1)
        sizes = [heads_of(module) // groups * size] * 2
        sizes.insert(0, len(weight) - sum(sizes))
        weights = weight.split(sizes)[1:]
        biases = [None] * 2 if biases[0] is None else biases[0].split(sizes)[1:]
    keys, values = (weight.unflatten(0, (-1, size)) for weight in weights)
    key_bias, value_bias = (None if bias is None else bias.unflatten(0, (-1, size)) for bias in biases)
    return Projections(keys, values, key_bias, value_bias)
