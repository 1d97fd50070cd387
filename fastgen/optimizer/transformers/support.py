"""Says why a request or a model is left to the host, or cannot decode over the tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fastgen import config as settings
from fastgen.optimizer import verification
from fastgen.optimizer.transformers import criteria, expansion, foreign_code, versions
from fastgen.optimizer.transformers.cache import users_cache
from fastgen.optimizer.transformers.cache.hosts_caches import replaced_method, unsupported_cache, unsupported_storage
from fastgen.optimizer.transformers.model.base import three_dimensions
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.versions import CACHE
from fastgen.replay import statistics
from fastgen.report import OfThisVersion

# These must begin with the batch's rows, `position_ids` of images apart: see `three_dimensions`.
_BEGIN_WITH_ROWS = ("decoder_position_ids", "latents", "position_ids")


def may_be_replayed(request: Request) -> bool:
    """Whether the steps of this call may be captured and replayed, as far as can be known without a trial."""
    model, device = request.model, request.input_ids.device
    rows, steps = request.input_ids.shape[0], request.generation_config.max_length - request.input_ids.shape[1]
    # Greedy search and sampling run in the host's own loop, which lets no sentence leave.
    stay = request.batch == 1 or not request.is_beam_search
    if not versions.COUNTS_IN_TENSORS or not statistics.are_wanted(model, device.type, stay, rows, steps):
        return False
    if settings.current().cache_threshold:  # which weights are left out differs from step to step
        return False
    # Code that watches or has replaced parts of the model expects them to be called.
    return not (request.foreign or request.facts.is_watched)


def _one_row_gains(request: Request) -> bool:
    """Whether one row of a prompt gains: on the CPU by faster linear layers, on a GPU by replayed steps alone."""
    if request.input_ids.device.type == "cpu":
        return True
    # Beside code of the user's between them, captured steps have not been measured on a GPU.
    return not request.calls_back and may_be_replayed(request) and off_tree_reason(request) is None


def unsupported_reason(request: Request, *, shares: bool = False) -> str | None:
    """Why this request has to be left to the host, in words for the user; None if it need not.

    `shares`: whether the rows share a batch with other requests.
    """
    model, config, kwargs = request.model, request.generation_config, request.model_kwargs
    if not isinstance(request.model, nn.Module):
        return f"{type(model).__name__} is no torch.nn.Module"
    if reason := foreign_code.ambient_reason():
        return reason
    if request.is_beam_search and request.beams < 2:
        return f"num_beams={request.beams} is no beam search"
    if not request.is_beam_search and criteria.longest(request.stopping_criteria) is None:
        return "no stopping criterion says how long its rows may be"
    if request.synced_gpus:
        return "synced_gpus keeps several processes in step"
    if reason := unsupported_configuration(model, config):
        return reason
    if config.prefill_chunk_size is not None and (model.config.is_encoder_decoder or "inputs_embeds" in kwargs):
        return "prefill_chunk_size is for decoder-only models that are given tokens"
    long_rope_from = getattr(model.config, "original_max_position_embeddings", None)
    if long_rope_from is not None and config.max_length > long_rope_from:
        return f"from {long_rope_from} tokens on the model may drop its cache and begin anew"
    if not kwargs.get("use_cache") or kwargs.get(CACHE) is None:
        if (name := _unknown_cache(kwargs)) is not None:
            return OfThisVersion(f"its cache is called {name}, and not {CACHE}")
        return "no cache of the standard kind is used"
    cache = kwargs[CACHE]
    if reason := replaced_method():
        return reason
    is_users = users_cache.is_users(cache)
    if not is_users and (reason := unsupported_storage(cache)):
        return reason
    if is_users and (unreadable := users_cache.unreadable(request)):
        return f"the user passed {CACHE}: {unreadable}"
    if is_users or _is_filled(cache):
        return f"the user passed {CACHE}"
    if reason := _unsupported_inputs(request, shares) or request.facts.unsupported:
        return reason
    if not request.is_beam_search and request.beams == 1 and not shares and not _one_row_gains(request):
        return "one sample of a prompt has nothing to share"
    return None


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # recurrent layers alone count no tokens
        return bool(cache.has_previous_state())


def _unsupported_inputs(request: Request, shares: bool) -> str | None:
    """Why the prompt cannot be read at one row per sentence, or None."""
    kwargs, rows = request.model_kwargs, request.input_ids.shape[:1]
    if unknown := [name for name in request.multimodal if shares or name not in request.unexpanded]:
        return f"the model takes further inputs ({', '.join(unknown)})"
    if changing := [name for name in request.multimodal if not expansion.is_data(kwargs[name])]:
        return f"the model takes further inputs that may change ({', '.join(changing)})"
    if request.input_ids.ndim != 2 or request.input_ids.shape[0] % request.beams:
        return f"input_ids of shape {tuple(request.input_ids.shape)} are not rows of beams"
    by_row = {name: _rows_first(name, value) for name, value in kwargs.items() if name not in request.multimodal}
    if not request.is_beam_search and not _repeats(request.beams, [request.input_ids, *_tensors(by_row)]):
        return "rows that should share a prompt differ"
    for name in _BEGIN_WITH_ROWS:
        value = kwargs.get(name) if shares else _rows_first(name, kwargs.get(name))
        if isinstance(value, Tensor) and value.shape[:1] != rows:
            return f"{name} of shape {tuple(value.shape)} does not begin with the rows of the batch"
    outputs = kwargs.get("encoder_outputs")
    if outputs is not None and outputs[0].shape[:1] != rows:
        return f"there are {outputs[0].shape[0]} rows of the source for {request.input_ids.shape[0]} of the prompt"
    return foreign_code.reason_against(request.foreign)


def unsupported_on_tree(request: Request, *, shares: bool = False) -> str | None:
    """Why this request cannot be decoded over the tree, in words for the user; None if it can.

    `shares`: see `unsupported_reason`.
    """
    return unsupported_reason(request, shares=shares) or off_tree_reason(request)


def off_tree_reason(request: Request) -> str | None:
    """Why this request, which need not be left to the host, cannot be decoded over the tree; None if it can."""
    kwargs = request.model_kwargs
    cache = kwargs[CACHE]
    if reason := unsupported_cache(cache) or request.facts.off_tree:
        return reason
    if request.beams > 1 and request.generation_config.remove_invalid_values:
        return "remove_invalid_values expects NaN, which would reach all beams or samples that share keys"
    prompt_mask = kwargs.get("decoder_attention_mask")
    if prompt_mask is not None and request.facts.sees_prompt_padding and not bool(prompt_mask.bool().all()):
        return "its steps attend to the padding of a prompt"
    source_mask = kwargs.get("attention_mask") if isinstance(cache, EncoderDecoderCache) else None
    if source_mask is not None and not bool(source_mask.bool().flatten(1).any(1).all()):
        return "a source is empty, and how that is attended to depends on the host's attention function"
    return None


def _unknown_cache(kwargs: dict[str, Any]) -> str | None:
    """The name of a standard cache of the host among the inputs, if it is a name that we do not know; else None."""
    if not kwargs.get("use_cache"):
        return None
    names = (name for name, value in kwargs.items() if type(value) in (DynamicCache, EncoderDecoderCache))
    # Mamba's cache has another name before 5.24, and encoders have caches, too.
    return next((name for name in names if "encoder" not in name and name != "cache_params"), None)


def unsupported_configuration(model: Any, config: Any) -> str | None:
    """Why no call with this model and generation configuration can decode over the tree; None if some can."""
    if reason := verification.reason_against(model):
        return reason
    if model.training or torch.is_grad_enabled():
        return "the model is in training mode" if model.training else "gradients are enabled"
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option, False) or getattr(model.config, option, False):
            return f"{option} asks for tensors of the host's own layout"
    if config.low_memory or config.is_assistant:
        return "low_memory and assisted decoding are left to the host"
    if config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={config.cache_implementation!r} was asked for"
    if len(set(getattr(model, "hf_device_map", None) or {})) > 1:
        return "the model is spread over several devices"
    return None


def _rows_first(name: str, value: Any) -> Any:
    return value.transpose(0, 1) if three_dimensions(name, value) else value


def _tensors(kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the host expands to rows, those in the encoder output included."""
    outputs = kwargs.get("encoder_outputs") or {}
    values = [*kwargs.values(), *(outputs.values() if isinstance(outputs, dict) else outputs)]
    return [value for value in values if isinstance(value, Tensor)]


def _repeats(times: int, tensors: list[Tensor]) -> bool:
    """Whether each row comes `times` times in turn. `generate` ensures it, but `_sample` may be called directly."""
    rows = tensors[0].shape[0]
    return times == 1 or all(
        bool((tensor.unflatten(0, (-1, times)) == tensor[::times, None]).all())
        for tensor in tensors
        if tensor.ndim and tensor.shape[0] == rows
    )
