"""Which calls of `generate` can be decoded together with others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from fastgen import config
from fastgen.optimizer.transformers import equivalence, interception
from fastgen.optimizer.transformers.families import SHARE_BATCHES
from fastgen.optimizer.transformers.model.facts import facts_of
from fastgen.optimizer.transformers.request import Request, rotates_by_length
from fastgen.optimizer.transformers.support import unsupported_on_tree


def unrefillable_model(model: Any) -> str | None:
    """Why no batch of this model can be kept full, or None."""
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:
        return "the model has its own generate"
    is_known = getattr(model.config, "model_type", None) in SHARE_BATCHES
    if not is_known or not (facts := facts_of(model)).is_hosts_own:
        return f"{type(model).__name__} has not been tried with sentences at different positions"
    if not facts.is_causal:
        return "tokens of its prompts attend to later ones, padding or not"
    return next((f"{finding}: such code may see other rows" for finding in facts.foreign), None)


def unrefillable(model: Any, call: Mapping[str, Any], *, tokens: bool = False) -> str | None:
    """Why a call like this one, of `model.generate`, cannot be decoded with others, or None.

    `tokens`: see `ContinuousBatch.admit`.
    """
    if reason := unrefillable_model(model):
        return reason
    try:
        with interception.intercepting():
            model.generate(**call)
    except interception.Intercepted as intercepted:
        request, stock = intercepted.request, intercepted.stock
    else:
        return "fastgen is disabled, or the search is none of those that it accelerates"
    if not request.is_beam_search and request.generation_config.do_sample and _draws_itself(model, call):
        return "its forward passes draw random numbers, and so change what is sampled"
    with torch.no_grad():
        return why_not_shared(request, stock, tokens)


def why_not_shared(request: Request, stock: Callable[..., Any], tokens: bool = False) -> str | None:
    """Why this call cannot be decoded with others, or None. `tokens`: greedy search and sampling can."""
    if config.current().tier not in ("auto", "fast"):
        return "another tier is configured"
    if not request.is_beam_search and not tokens:
        return "it is no beam search"
    if request.held is not None:
        return "a streamer gets the tokens of one call"
    if request.diverse:
        return "beams in groups are searched by a loop of their own"
    if rotates_by_length(request):
        return "its position embeddings depend on the longest text of the batch"
    if not (request.may_evict if request.is_beam_search else request.has_free_rows):
        return "what is asked for needs all sentences of a batch until its end"
    return (
        unrefillable_model(request.model)
        or unsupported_on_tree(request, shares=tokens)
        or request.changed_rule
        or equivalence.failed_equivalence(request, stock)
    )


_drawing: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _draws_itself(model: Any, call: Mapping[str, Any]) -> bool:
    """Whether forward passes use torch's random stream, as layers that might be dropped do in some versions."""
    if model not in _drawing:
        first = {name: value[:1] for name, value in call.items() if isinstance(value, Tensor)}
        before = torch.get_rng_state()
        model.generate(**first, do_sample=False, num_beams=1, num_return_sequences=1, max_new_tokens=2)
        _drawing[model] = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    return _drawing[model]
