"""Beam search of Hugging Face transformers over the beam tree."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastgen._patching import PatchSet, SeamMismatch, require_signature

_BEAM_SEARCH = (
    "self",
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "model_kwargs",
)
_NEEDED = (
    "_update_model_kwargs_for_generation",
    "_get_top_k_continuations",
    "_update_finished_beams",
)


def install(patches: PatchSet, module: ModuleType) -> None:
    """Replace `GenerationMixin._beam_search` of `module`, transformers.generation.utils.

    Raises SeamMismatch if this version's seams differ from those our loop was written for.
    """
    mixin = module.GenerationMixin
    stock = mixin._beam_search
    require_signature(stock, _BEAM_SEARCH)
    for name in _NEEDED:
        if not hasattr(mixin, name):
            raise SeamMismatch(f"GenerationMixin has no {name}")

    @functools.wraps(stock)
    def _beam_search(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        # The host is still being imported when this module is: its parts are loaded at the first call.
        try:
            from fastgen.optimizer.transformers import dispatch
            from fastgen.optimizer.transformers.requests import Request
        except (ImportError, AttributeError) as error:  # names that this version of the host lacks
            warnings.warn(f"fastgen leaves transformers alone: {error}", RuntimeWarning, stacklevel=3)
            patches.revert()
            args = (self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
            return stock(*args, **model_kwargs)

        request = Request(
            self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, model_kwargs
        )
        return dispatch.run(request, stock)

    patches.replace(mixin, "_beam_search", _beam_search)
    if not hasattr(mixin, "_prefill"):  # 4.57
        patches.replace(mixin, "_prepare_cache_for_generation", _marking(mixin._prepare_cache_for_generation))


def _marking(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """5.x marks a cache that the user passed, and the user may look into it later; do so where the host doesn't."""

    @functools.wraps(prepare)
    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> Any:
        cache: Any = model_kwargs.get("past_key_values")
        if hasattr(cache, "get_seq_length"):
            cache._is_user_defined = True
        return prepare(self, generation_config, model_kwargs, *args)

    return _prepare_cache_for_generation
