"""Patches Hugging Face transformers, so that it generates over the beam tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastgen import config, report
from fastgen.optimizer.transformers import expansion, streaming, word_times
from fastgen.patching import hosts
from fastgen.patching.patch_set import PatchSet, SeamMismatch, require_own, require_signature

TESTED = "5.24.0"  # the newest version of the host

_SEARCH = (
    "self",
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "model_kwargs",
)
_SEAMS = {
    "_beam_search": _SEARCH,
    "_sample": (*_SEARCH[:-1], "streamer", "model_kwargs"),
}
# The method that runs the encoder, by its name in newer versions and in older ones.
_ENCODES = (
    "_prepare_text_encoder_decoder_kwargs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
)
_ENCODER = ("self", "inputs_tensor", "model_kwargs", "model_input_name", "generation_config")
_EXPANDS = "_expand_inputs_for_generation"
_NEEDED = (
    "_update_model_kwargs_for_generation",
    "_get_top_k_continuations",
    "_update_finished_beams",
)


def install(patches: PatchSet, module: ModuleType) -> None:
    """Patch one of transformers' modules, transformers.generation.utils or Whisper's own generation.

    Raises SeamMismatch if this version's seams differ from those our code was written for.
    """
    if module.__name__ == "transformers.generation.utils":
        _install(patches, module)
    else:
        word_times.install(patches, module)


def _install(patches: PatchSet, module: ModuleType) -> None:
    """Replace `_beam_search`, `_sample` and the method that calls the encoder in `module`'s GenerationMixin."""
    mixin = module.GenerationMixin
    for name, parameters in _SEAMS.items():
        stock = patches.stock(mixin, name)
        require_signature(stock, parameters)
        require_own(stock, "transformers")
    for name in _NEEDED:
        if not hasattr(mixin, name):
            raise SeamMismatch(f"GenerationMixin has no {name}")
    for name in _ENCODES:
        with contextlib.suppress(AttributeError, SeamMismatch):  # an encoder that reads padding only costs time
            prepare = patches.stock(mixin, name)
            require_signature(prepare, _ENCODER)
            patches.replace(mixin, name, _without_padding(prepare))
    # Without it, or in 4.57, models that are given images are left to the host.
    if hasattr(mixin, "_prefill") and (expands := vars(mixin).get(_EXPANDS)) is not None:
        patches.replace(mixin, _EXPANDS, expansion.noted(expands))
    _provide_diverse(patches, module)
    for name in _SEAMS:
        patches.replace(mixin, name, _accelerated(patches.stock(mixin, name), patches))
    with contextlib.suppress(AttributeError, SeamMismatch):  # without it streamers are refused with beams, as in stock
        validate = patches.stock(mixin, "_validate_generation_mode")
        require_signature(validate, streaming.VALIDATES)
        patches.replace(mixin, "_validate_generation_mode", streaming.holding(validate, mixin))
    patches.replace(mixin, "generate", _verified(patches.stock(mixin, "generate")))
    if not hasattr(mixin, "_prefill"):  # 4.57
        prepare = patches.stock(mixin, "_prepare_cache_for_generation")
        patches.replace(mixin, "_prepare_cache_for_generation", _marking(prepare))


def _verified(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The host's `generate`, one call as `facts` counts calls; compared with stock where the user asks for that."""

    @functools.wraps(stock)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with expansion.of_one_call(kwargs.get("custom_generate")):
            return stock(self, *args, **kwargs)

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hosts.is_on():  # called by a function that others have put over this one, which stays
            return stock(self, *args, **kwargs)
        verification: Any = None
        try:
            from fastgen.optimizer.transformers.model.facts import one_call

            if config.current().verify:
                from fastgen.optimizer.transformers import verification
        except (ImportError, AttributeError):  # the search that follows reports it
            return stock(self, *args, **kwargs)
        args, kwargs = streaming.streamer_held(stock, self, args, kwargs)
        if verification is not None:
            return verification.run(noting, self, args, kwargs)
        with one_call():
            return noting(self, *args, **kwargs)

    return generate


def _provide_diverse(patches: PatchSet, module: ModuleType) -> None:
    """If the host would load the search for `num_beam_groups` > 1 from the Hub, let it find ours instead."""
    methods = getattr(module, "GENERATION_MODES_MAPPING", {})
    mode = next((mode for mode, name in methods.items() if name.endswith("/group-beam-search")), None)
    if mode is not None:
        # In this order, as another thread may look in between; they are reverted in the reverse order.
        stock = patches.stock(module.GenerationMixin, "_beam_search")
        patches.replace(module.GenerationMixin, "_group_beam_search", _diverse(stock))
        patches.replace(module, "GENERATION_MODES_MAPPING", {**methods, mode: "_group_beam_search"})


def _accelerated(stock: Callable[..., Any], patches: PatchSet) -> Callable[..., Any]:
    @functools.wraps(stock)
    def generate(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        args = (self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
        if not hosts.is_on() and not isinstance(model_kwargs.get("streamer"), streaming.HeldStreamer):
            return stock(*args, **model_kwargs)  # see `_verified`; what has begun with a HeldStreamer ends with it
        if getattr(generation_config, "is_assistant", False):  # a part of assisted decoding, which is the host's
            return stock(*args, **model_kwargs)
        # The host is still being imported when this module is: these are imported at the first call.
        try:
            from fastgen.optimizer.transformers import dispatch
            from fastgen.optimizer.transformers.request import Request
        except (ImportError, AttributeError) as error:  # names that this version of the host lacks
            patches.give_up(str(error))
            report.warn_of_version("transformers", f"alone: {error}", loses_nothing=True)
            return stock(*args, **model_kwargs)
        unexpanded = expansion.unexpanded_inputs(input_ids, model_kwargs)
        streamer, held = model_kwargs.get("streamer"), None
        if isinstance(streamer, streaming.HeldStreamer):
            streamer, held = streamer.streamer, streamer
        if stock.__name__ == "_beam_search":
            if held is not None:
                del model_kwargs["streamer"]
            request = Request(*args, model_kwargs, held and streamer, unexpanded=unexpanded, held=held)
        else:
            model_kwargs.pop("streamer", None)
            request = Request(*args, model_kwargs, streamer, is_beam_search=False, unexpanded=unexpanded)
        return dispatch.run(request, stock)

    return generate


def _diverse(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Our diverse beam search as a method of the host; `stock`: the host's `_beam_search`."""

    def _group_beam_search(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        from fastgen.optimizer.transformers import dispatch
        from fastgen.optimizer.transformers.generate.diverse_beam_search import check, group_beam_search
        from fastgen.optimizer.transformers.request import Request

        check(generation_config, synced_gpus, streamer)
        args = (self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus)
        return dispatch.run(Request(*args, model_kwargs, diverse=group_beam_search), stock)

    return _group_beam_search


def _without_padding(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `prepare` so that the encoder doesn't read padding: see the module `model.encoder`."""

    @functools.wraps(prepare)
    def prepared(
        self: Any, inputs_tensor: Any, model_kwargs: dict[str, Any], model_input_name: Any, generation_config: Any
    ) -> Any:
        if not hosts.is_on():
            return prepare(self, inputs_tensor, model_kwargs, model_input_name, generation_config)
        try:
            from fastgen.optimizer import together
            from fastgen.optimizer.transformers.model.encoder import encode
        except (ImportError, AttributeError):  # the search that follows reports it
            return prepare(self, inputs_tensor, model_kwargs, model_input_name, generation_config)
        args = prepare, self, inputs_tensor, model_kwargs, model_input_name, generation_config
        if not together.is_inside() or together.is_apart(self.device):
            return encode(*args)
        return together.outside(encode, *args)

    return prepared


def _marking(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `prepare` to mark a cache that the user passed, and may look into later; versions from 5.0 on do so."""

    @functools.wraps(prepare)
    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        from fastgen.optimizer.transformers.versions import CACHE

        cache: Any = model_kwargs.get(CACHE)
        if hasattr(cache, "get_seq_length"):
            cache._is_user_defined = True
        return prepare(self, generation_config, model_kwargs, *args, **kwargs)

    return _prepare_cache_for_generation
