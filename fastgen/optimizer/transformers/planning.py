"""Which caches a call has."""

from __future__ import annotations

import weakref
from typing import Any

from fastgen import config
from fastgen.cache import planner
from fastgen.cache.slim import Choice
from fastgen.optimizer.transformers import modules, slim
from fastgen.optimizer.transformers.requests import Request


def plan_for(request: Request) -> tuple[Choice, str | None]:
    """Which caches of a call are slim, and what speaks for it."""
    model, wanted = request.model, config.current().cache
    geometry = _geometry_of(model) if modules.is_tested(model) else None
    if geometry is None or wanted == "kv":
        return Choice(), slim.unsupported_reason(model) if wanted == "x" else None
    plan = planner.plan_on(request.input_ids.device, model.dtype, geometry, _call_of(request), wanted)
    if plan.choice != Choice() and (reason := slim.unsupported_reason(model)):
        return Choice(), reason
    return plan.choice, str(plan)


def fixed_choice(model: Any) -> Choice:
    """The same where many calls share a cache, and none is known before: slim ones where they are asked for."""
    is_slim = config.current().cache == "x" and slim.unsupported_reason(model) is None
    return Choice(own=is_slim, source=is_slim)


_geometries: weakref.WeakKeyDictionary[Any, planner.Geometry | None] = weakref.WeakKeyDictionary()


def _geometry_of(model: Any) -> planner.Geometry | None:
    """Of the model's decoder; None if none of its caches can be slim."""
    if model not in _geometries:
        _geometries[model] = _geometry(model)
    return _geometries[model]


def _geometry(model: Any) -> planner.Geometry | None:
    attentions: list[Any] = list(slim.attention_modules(model))
    if not attentions:
        return None
    layers = len(attentions) // 2 if model.config.is_encoder_decoder else 0
    module = attentions[-1]
    projections, width = slim.projections_of(module), slim.projections_of(attentions[0]).key.shape[2]
    key_heads, size, source_width = projections.key.shape
    heads = next(getattr(module, name) for name in ("num_heads", "n_heads") if hasattr(module, name))
    return planner.Geometry(len(attentions) - layers, layers, heads, key_heads, size, width, source_width)


def _call_of(request: Request) -> planner.Call:
    outputs = request.model_kwargs.get("encoder_outputs")
    source = 0 if outputs is None else outputs[0].shape[1]
    prompt = request.input_ids.shape[1]
    steps = max(request.generation_config.max_length - prompt, 1)
    return planner.Call(request.batch, request.beams, prompt, source, steps, request.model.dtype.itemsize)
