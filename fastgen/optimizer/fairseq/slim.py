"""Slim caches for the host's attention modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen import config
from fastgen.cache import planner
from fastgen.cache.slim import Choice, Projections, Slim, slim_cache
from fastgen.optimizer.fairseq.requests import Request
from fastgen.optimizer.fairseq.views import is_plain


def plan_for(request: Request, source: Tensor) -> tuple[Choice, str | None]:
    """Which caches of a call are slim, and what speaks for it; `source`: see `Request.source`."""
    wanted = config.current().cache
    if wanted == "kv":
        return Choice(), None
    if torch.is_autocast_enabled(source.device.type):
        return Choice(), "what autocast rounds are keys and values" if wanted == "x" else None
    decoder = request.generator.model.single_model.decoder
    own = decoder.layers[0].self_attn
    across = [layer.encoder_attn for layer in decoder.layers if layer.encoder_attn is not None]
    count = len(request.generator.model.models)
    width = across[0].kdim if across else 0
    geometry = planner.Geometry(
        count * len(decoder.layers),
        count * len(across),
        own.num_heads,
        own.num_heads,
        own.head_dim,
        own.embed_dim,
        width,
    )
    dtype, length = own.out_proj.weight.dtype, int(source.shape[1])
    positions = length if across else 0
    call = planner.Call(request.batch, request.beams, 1, positions, request.max_steps, dtype.itemsize)
    if wanted in ("k", "v"):
        return Choice(), f"cache={wanted!r} is for transformers' models"
    plan = planner.plan_on(source.device, dtype, geometry, call, wanted)
    return plan.choice, str(plan)


def fixed_choice(device: torch.device) -> Choice:
    """The same where the sentences of many calls share a cache: slim ones where they are asked for."""
    is_slim = config.current().cache == "x" and not torch.is_autocast_enabled(device.type)
    return planner.asked_for("x") if is_slim else Choice()


def slim_of(module: Any, kind: str) -> Slim | None:
    """How this attention module attends to a cache of this kind; None if it stores keys and values."""
    layers = module.k_proj, module.v_proj
    if kind == "kv" or not all(map(is_plain, layers)):
        return None
    heads = module.num_heads
    weights = (layer.weight.unflatten(0, (heads, -1)) for layer in layers)
    biases = (None if layer.bias is None else layer.bias.unflatten(0, (heads, -1)) for layer in layers)
    return slim_cache(kind, Projections(*weights, *biases), config.current().cache_threshold)
