"""A cache that the user passes to `generate`, with the beginning of the prompts in it: the host's documented way to
read a prefix once. Its content is copied into the tree; in the end it holds what the host would have left in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fastgen import phases
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import gathered
from fastgen.optimizer.transformers.cache.tree_cache import TreeCache
from fastgen.optimizer.transformers.families import FAMILIES
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.versions import CACHE

__phase__ = phases.CACHE


def taken(request: Request) -> Request:
    """The request over an empty cache, with the user's beside; the request itself if there is none that can be read."""
    cache = request.model_kwargs.get(CACHE)
    if not is_users(cache) or not isinstance(request.model, nn.Module) or unreadable(request) is not None:
        return request
    model: Any = request.model
    empty = DynamicCache(config=model.config.get_text_config(decoder=True))
    return dataclasses.replace(request, model_kwargs={**request.model_kwargs, CACHE: empty}, users_cache=cache)


def is_users(cache: Any) -> bool:
    """Whether the user has made this cache, and may look into it later."""
    return bool(getattr(cache, "_is_user_defined", False))


def unreadable(request: Request) -> str | None:
    """Why a cache that the user passed cannot be read into a tree and handed back, or None."""
    cache, model = request.model_kwargs[CACHE], request.model
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or any(map(_has_code, _parts(cache))):
        return "it is no plain DynamicCache"
    family = FAMILIES.get(getattr(model.config, "model_type", ""))
    if family is None or not family.chunks_prompts or not versions.PREFILLS or not request.facts.is_tested:
        return "this model has not been compared with stock where a prompt is read in parts"
    if request.calls_back or request.diverse or request.foreign:
        return "code of yours, which may look into it, runs between the steps"
    if request.generation_config.prefill_chunk_size is not None and not versions.chunks_the_rest():
        return "this version of transformers reads the whole prompt in chunks"
    if not _has_the_models_layers(cache, model):
        return "its layers are not those of DynamicCache(config=model.config)"
    if not _has_whole_prompts(request):
        return "the tokens that it holds must be the beginning of input_ids, and fewer"
    if any(not _is_whole(layer, request) for layer in cache.layers):
        return "it holds other rows than the call has, not all positions, or another dtype than the model's"
    if request.beams > 1 and not all(_is_repeated(x, request.beams) for x in _states(cache)):
        return "the beams of a sentence do not begin alike in it"
    return None


def _has_the_models_layers(cache: Any, model: Any) -> bool:
    """Whether the cache's layers are of the kinds that the host would make, windows included."""
    likes = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    kinds = [_kind(layer) for layer in likes]
    if not set(kinds) <= {(DynamicLayer, None), *((DynamicSlidingWindowLayer, window) for _, window in kinds)}:
        return False
    if cache.layer_class_to_replicate is not None:  # layers are made as they are needed, all of one kind
        now = [_kind(layer) for layer in cache.layers] or [(DynamicLayer, None)] * len(kinds)
        return cache.layer_class_to_replicate is DynamicLayer and now == kinds
    return [_kind(layer) for layer in cache.layers] == kinds


def _kind(layer: Any) -> tuple[type, int | None]:
    return gathered.hosts_type(layer), getattr(layer, "sliding_window", None)


def _parts(cache: Any) -> list[Any]:
    return [cache, *cache.layers]


def _has_code(part: Any) -> bool:
    """Whether a method has been replaced in the object, by code that the host would call."""
    return any(callable(value) and not isinstance(value, type) for value in vars(part).values())


def takes_up(request: Request) -> bool:
    """Whether the host reads only those of `input_ids` that are not in the cache: the mask's length tells it."""
    mask = request.model_kwargs.get("attention_mask")
    told = getattr(request.generation_config, "_mask_length", -1) if mask is None else mask.shape[-1]
    return bool(told == request.input_ids.shape[1])


def _has_whole_prompts(request: Request) -> bool:
    """Whether the host would take what is in the cache for the beginning of `input_ids`."""
    lengths = {int(layer.get_seq_length()) for layer in request.model_kwargs[CACHE].layers} or {0}
    embeds = request.model_kwargs.get("inputs_embeds")
    return takes_up(request) and len(lengths) == 1 and lengths.pop() < request.input_ids.shape[1] and embeds is None


def _is_whole(layer: Any, request: Request) -> bool:
    """Whether a layer has all positions so far, and as many rows as the call."""
    if not layer.is_initialized or not layer.get_seq_length():
        return True
    keys, values, rows = layer.keys, layer.values, request.input_ids.shape[0]
    return (
        keys.shape[:-1] == values.shape[:-1]
        and keys.shape[0] == rows
        and keys.shape[2] == layer.get_seq_length()
        and not getattr(layer, "record_past", False)
        and {keys.dtype, values.dtype} == {request.model.dtype}
        and keys.device == values.device == request.input_ids.device
        and not (keys.requires_grad or values.requires_grad)
    )


def _is_repeated(states: Tensor, beams: int) -> bool:
    groups = states.unflatten(0, (-1, beams))
    return bool((groups == groups[:, :1]).all())


def _states(cache: Any) -> list[Tensor]:
    filled = [layer for layer in cache.layers if layer.is_initialized and layer.get_seq_length()]
    return [states for layer in filled for states in (layer.keys, layer.values)]


def fill(tree_cache: TreeCache, cache: Any, beams: int) -> None:
    """Store in the empty tree what the user's cache holds, at one row per sentence."""
    tree, states = tree_cache.session.tree, _states(cache)
    for number in range(len(states) // 2):
        layer = TreeLayer(tree, tree_cache.windows[number] if number < len(tree_cache.windows) else None)
        layer.prefill(*(x.detach()[::beams] for x in states[2 * number : 2 * number + 2]))
        tree.layers.append(layer)
    tree_cache.cover()


def hand_back(cache: Any, made: Any) -> None:
    """Leave in the user's cache what is in `made`, the one that the host would have returned."""
    # All are gathered before anything is changed: memory may run out.
    states = [(layer.keys, layer.values) for layer in made.layers]
    while len(cache.layers) < len(made.layers):
        cache.layers.append(DynamicLayer())
    for layer, gathered_layer, (keys, values) in zip(cache.layers, made.layers, states, strict=True):
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = gathered_layer.get_seq_length()
