"""Decides which attention modules have slim caches in a call."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from fastgen import config
from fastgen.cache.slim import planner
from fastgen.cache.slim.latent import Choice, HybridCache, Slim, slim_cache, state_of_weights
from fastgen.memory.release import keeper
from fastgen.optimizer.transformers import criteria
from fastgen.optimizer.transformers.cache import slim
from fastgen.optimizer.transformers.cache.slim import LayerCaches
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import store

if TYPE_CHECKING:
    from fastgen.cache.slim.table import Layer


@dataclass(frozen=True)
class Caches:
    """The slim caches of a call."""

    layer_caches: dict[nn.Module, LayerCaches]  # the modules that have slim caches
    plan: str | None = None  # the reasons, in words


def plan_for(request: Request, stock: Callable[..., Any]) -> Caches:
    """The caches of one call; `stock` is the host's `_beam_search` or `_sample`."""
    model, wanted = request.model, config.current().cache
    if wanted == "kv":
        return Caches({})
    if request.foreign:
        return Caches({}, None if wanted == "auto" else f"{request.foreign[0]}, and may look at keys and values")
    if request.calls_back:
        return Caches({}, None if wanted == "auto" else _EDITABLE)
    geometry = _geometry_of(model) if request.facts.is_tested else None
    if geometry is None:
        return Caches({}, None if wanted == "auto" else slim.unsupported_reason(model))
    if wanted == "auto" and geometry.is_rotary:  # there is nothing to choose
        return Caches({})
    plan = planner.plan_on(request.input_ids.device, model.dtype, geometry, _call_of(request), wanted)
    if plan.choice == Choice():
        return Caches({}, str(plan))
    return _admitted(request, stock, plan.choice, str(plan))


def fixed_for(request: Request, stock: Callable[..., Any]) -> Caches:
    """The caches that many calls share, of which this is the first: slim ones only where the user asks for them."""
    wanted = config.current().cache
    return Caches({}) if wanted in ("auto", "kv") else _admitted(request, stock, planner.asked_for(wanted), None)


@dataclass(frozen=True)
class _Judged:
    choice: Choice
    state: Hashable  # of the model's weights and the user's settings
    caches: Caches


# Stored keys and values do not follow a later edit of a weight; those that a slim cache computes would.
_EDITABLE = "code of yours runs between the steps, and might edit the weights"
_VIEWS = Choice("x", "e")
_OF_VIEWS = [Choice(*kinds) for kinds in itertools.product(("kv", "x"), ("kv", "e"))]  # these invert no weight
_judged: weakref.WeakKeyDictionary[Any, _Judged] = weakref.WeakKeyDictionary()


@keeper
def release() -> None:
    """Forget all judgements, and the inverted weights with them."""
    _judged.clear()


def _admitted(request: Request, stock: Callable[..., Any], choice: Choice, plan: str | None) -> Caches:
    """The caches of layers that are exact enough with them: tried on a few sentences, once for a model's weights."""
    model, threshold = request.model, config.current().cache_threshold
    if reason := slim.unsupported_reason(model):
        return Caches({}, reason)
    # One call may want X and the next E: both are tried at once.
    wanted, choice = choice, _VIEWS if choice in _OF_VIEWS else choice
    # Another implementation of attention may compute something else.
    how = (choice, threshold, model.dtype, getattr(model.config, "_attn_implementation", None))
    state = (how, _state_of(model))
    judged = _judged.get(model)
    if judged is None or judged.state != state:
        if judged is not None and judged.choice not in _OF_VIEWS:
            store.drop(model)  # steps recorded with the old inverted weights: no call will take them again
        try:
            caches = _judge(request, stock, choice, threshold)
        except Exception as error:  # the call itself may succeed, and if not, will say so
            caches = Caches({}, f"a trial failed ({type(error).__name__}: {error})")
        judged = _judged[model] = _Judged(choice, state, caches)
    caches = judged.caches
    layer_caches = caches.layer_caches if wanted == choice else _those(caches.layer_caches, wanted)
    return Caches(layer_caches, "; ".join(filter(None, (plan, caches.plan))) or None)


def _those(layer_caches: dict[nn.Module, LayerCaches], wanted: Choice) -> dict[nn.Module, LayerCaches]:
    """Those of the caches of X and E that are wanted."""
    is_wanted = {"self_attn": wanted.self_attn != "kv", "cross_attn": wanted.cross_attn != "kv"}
    return {
        module: its
        for module, its in layer_caches.items()
        if any(is_wanted[name] and getattr(its, name) is not None for name in is_wanted)
    }


def _judge(request: Request, stock: Callable[..., Any], choice: Choice, threshold: float) -> Caches:
    from fastgen.optimizer.transformers.cache.inspection import inspect_request

    kinds = {"x" if kind == "e" else kind for kind in (choice.self_attn, choice.cross_attn)} - {"kv"}
    reasons = [
        slim.unsupported_kind(module, kind) for module in slim.attention_modules(request.model) for kind in kinds
    ]
    if all(reasons):  # no trial is needed
        return Caches({}, reasons[0])
    layer_caches: dict[nn.Module, LayerCaches] = {}
    refused = []
    first: Layer | None = None  # the first cross-attention layer
    for layer in inspect_request(request, stock, sorted(kinds), is_sparse=threshold > 0):
        wanted = choice.cross_attn if layer.is_cross_attn else choice.self_attn
        if wanted == "h" and first is None:
            first = layer
        if wanted == "kv":
            continue
        if (reason := layer.verdicts["x" if wanted == "e" else wanted].reason) is not None:
            refused.append(f"{layer.name} stores keys and values: {reason}")
        elif wanted == "h" and first is not None and first is not layer and first.module not in layer_caches:
            refused.append(f"{layer.name} stores keys and values: the first layer's keys are not stored alone")
        else:
            cache = _cache_of(layer, wanted, first, threshold)
            layer_caches[layer.module] = (
                LayerCaches(cross_attn=cache) if layer.is_cross_attn else LayerCaches(self_attn=cache)
            )
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return Caches(layer_caches, refused[0] + more if refused else None)


def _cache_of(layer: Layer, kind: str, first: Layer | None, threshold: float) -> Slim:
    projections = slim.projections_of(layer.module)
    if kind != "h":
        return slim_cache(kind, projections, threshold, slim.is_rotary(layer.module))
    assert first is not None
    if layer is first:
        return slim_cache("k", projections, threshold)
    return HybridCache(projections, slim.projections_of(first.module), threshold)


def _state_of(model: Any) -> Hashable:
    """A value that changes with the weights of the key and value projections."""
    return state_of_weights(p for module in slim.attention_modules(model) for p in _parameters(module))


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for layer in slim.projecting_layers(module) for parameter in layer.parameters(recurse=False)]


_geometries: weakref.WeakKeyDictionary[Any, planner.Geometry] = weakref.WeakKeyDictionary()


def _geometry_of(model: Any) -> planner.Geometry | None:
    """The sizes of the model's decoder; None if none of the caches can be slim."""
    geometry = _geometries.get(model) or _geometry(model)
    if geometry is not None:
        _geometries[model] = geometry
    return geometry


def _geometry(model: Any) -> planner.Geometry | None:
    attentions: list[Any] = list(slim.attention_modules(model))
    if not attentions:
        return None
    layers = len(attentions) // 2 if model.config.is_encoder_decoder else 0
    module = attentions[-1]
    width = slim.projections_of(attentions[0]).key.shape[2]
    key_heads, size, source_width = slim.projections_of(module).key.shape
    heads, is_rotary = slim.heads_of(module), slim.is_rotary(module)
    own = len(attentions) - layers
    return planner.Geometry(own, layers, heads, key_heads, size, width, source_width, is_rotary)


def _call_of(request: Request) -> planner.Call:
    outputs = request.model_kwargs.get("encoder_outputs")
    source = 0 if outputs is None else outputs[0].shape[1]
    prompt = request.input_ids.shape[1]
    # Any number may be allowed.
    longest = min(request.generation_config.max_length, max(criteria.positions(request.model), prompt + 1), 2**31)
    steps = max(int(longest) - prompt, 1)
    return planner.Call(request.batch, request.beams, prompt, source, steps, request.model.dtype.itemsize)
