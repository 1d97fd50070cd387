"""Facts about a model that decide how calls run: found in one walk over the modules, kept until the model changes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fastgen.memory.release import keeper
from fastgen.optimizer.transformers import foreign_code
from fastgen.optimizer.transformers.interception import Wrapper
from fastgen.optimizer.transformers.model import modules, streams
from fastgen.optimizer.transformers.replay.guards import guards_of
from fastgen.optimizer.transformers.versions import FINDS_EAGER
from fastgen.patching import replaced_code
from fastgen.patching.foreign_code import Finding, around_all_models
from fastgen.replay.guards import ModelGuards

_ATTENTION = (None, "eager", "sdpa") if FINDS_EAGER else (None, "sdpa")
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model that depend on no request."""

    is_hosts_own: bool  # all forward methods are the host's, torch's or ours
    is_tested: bool  # the same, prompts are causal, and the test suite compares the family with stock
    is_causal: bool  # no token of a prompt attends to later ones
    foreign: list[Finding]  # foreign code that a decode step would run
    foreign_in_encoder: list[Finding]  # foreign code that the encoder, which is called before the search, would run
    overridden_rule: str | None  # the search rule that the model's class, though the host's, overrides
    unsupported: str | None  # why the model is left to the host, whatever the request
    off_tree: str | None  # why the model cannot decode over the tree, whatever the request
    is_watched: bool  # whether foreign code sees the calls of a step's module, or has replaced one
    is_interrupted: bool  # whether foreign code may run when one of these is called
    is_encoder_watched: bool
    sees_prompt_padding: bool  # generated tokens attend to padding of the prompt
    takes_plain_mask: bool  # the model's code needs a source mask in two dimensions
    rotates_from: float  # the length from which on rotations may depend on the longest row
    paddings: frozenset[int]  # tokens that modules of a step were made to take for padding
    folding: dict[tuple[type, str], Wrapper]  # wrappers of classes that compute attention themselves
    replayable: dict[tuple[type, str], Wrapper]  # wrappers of classes that would wait for a device
    identity: object = field(default_factory=object, compare=False)  # of these facts and no others


def facts_of(model: Any) -> ModelFacts:
    """The facts of the model as it is now or, inside `one_call`, as it was when first asked for."""
    known: weakref.WeakKeyDictionary[Any, ModelFacts] | None = getattr(_local, "known", None)
    if known is not None and model in known:
        return known[model]
    facts, is_complete = _looked_up(model)
    if known is not None and is_complete:
        known[model] = facts
    return facts


def are_guarded(model: Any, facts: ModelFacts) -> bool:
    """Whether these facts of the model would have been found anew if anything in it but tensors had changed."""
    kept = _kept.get(model)
    return kept is not None and kept[2] is facts


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Inside the block, one call of the host's `generate` in this thread, each model is looked at only once.

    A model that holds code of the user's is looked at each time: that code may change the model in between.
    """
    before = getattr(_local, "known", None)
    _local.known = weakref.WeakKeyDictionary()
    try:
        yield
    finally:
        _local.known = before


def _looked_up(model: Any) -> tuple[ModelFacts, bool]:
    """The facts, and whether guards would see any change of the model."""
    kept = _kept.get(model)
    if kept is None or kept[1] != around_all_models() or not kept[0].is_same_code():
        everything = list(model.modules())
        surroundings, guards = around_all_models(), guards_of(everything)
        kept = guards, surroundings, _facts(model, everything)
        if guards.is_complete:
            _kept[model] = kept
        else:  # guards would miss a change, so the model is looked at each time
            _kept.pop(model, None)
    return kept[2], kept[0].is_complete


_local = threading.local()
_kept: weakref.WeakKeyDictionary[Any, tuple[ModelGuards, Any, ModelFacts]] = weakref.WeakKeyDictionary()


@keeper
def release() -> None:
    """Forget all facts, which are found again when needed."""
    _kept.clear()


def _facts(model: Any, everything: list[nn.Module]) -> ModelFacts:
    parts = dict(modules.named_decoder_modules(model))
    kinds, steps = {type(module) for module in everything}, list(parts.values())
    encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else None
    in_encoder = [] if encoder is None else list(encoder.named_modules())
    is_hosts_own, is_causal = modules.are_the_hosts_own(kinds), modules.is_causal(model)
    is_tested = is_hosts_own and is_causal and modules.is_of_tested_family(model)
    return ModelFacts(
        is_hosts_own=is_hosts_own,
        is_tested=is_tested and not _has_weights_of_other_kinds(model),
        is_causal=is_causal,
        foreign=[*foreign_code.of_modules(parts.items()), *foreign_code.replaced_attention(everything)],
        foreign_in_encoder=foreign_code.of_modules(in_encoder),
        overridden_rule=foreign_code.overridden_rule(model),
        unsupported=_unsupported(model, everything, parts),
        off_tree=_off_tree(model, everything, parts),
        is_watched=replaced_code.is_watched(steps),
        is_interrupted=replaced_code.are_interrupted(steps),
        is_encoder_watched=replaced_code.is_watched(module for _, module in in_encoder),
        sees_prompt_padding=streams.sees_padding(model),
        takes_plain_mask=modules.takes_plain_mask(kinds),
        rotates_from=modules.rotates_by_length_from(steps),
        paddings=frozenset(found for step in steps if isinstance(found := getattr(step, "padding_idx", None), int)),
        folding=modules.hand_written_attention(kinds),
        replayable=modules.replayable_inputs(kinds),
    )


def _has_weights_of_other_kinds(model: Any) -> bool:
    """Whether a weight is of a subclass of torch's, such as a quantised one."""
    return any(type(weight) not in (Tensor, nn.Parameter) for weight in model.parameters())


def _unsupported(model: Any, everything: list[nn.Module], parts: dict[str, nn.Module]) -> str | None:
    """Why this model is left to the host, whatever the request; None if it is not."""
    if hasattr(model, "_reorder_cache"):
        return "the model reorders its cache itself"
    if training := next((path for path, module in parts.items() if _is_training(module)), None):
        return f"{training} is in training mode"
    return unsupported_modules(everything)


def _off_tree(model: Any, everything: list[nn.Module], parts: dict[str, nn.Module]) -> str | None:
    """Why this model cannot decode over the tree, whatever the request; None if it can."""
    numbers = {part.layer_idx for part in parts.values() if isinstance(getattr(part, "layer_idx", None), int)}
    if numbers and 0 not in numbers:  # the host asks layer 0 for the cache's length
        return "its first layer has been cut out, and the others keep their numbers"
    if reason := streams.unsupported_model(model, everything):
        return reason
    if name := modules.unfoldable_attention({type(module) for module in everything}):
        return f"{name} computes attention itself instead of calling an attention function"
    if name := modules.past_the_function(parts.values()):
        return f"{name} computes attention itself, as its configuration says, past the function that it looks up"
    for module in everything:
        config = getattr(module, "config", None)
        types = getattr(config, "layer_types", None) or ()
        if unknown := sorted(set(types) - set(_LAYER_TYPES)):
            return f"it has layers of type {', '.join(unknown)}"
        if getattr(config, "attention_chunk_size", None) is not None:
            return "it attends in chunks"
    return None


def _is_training(module: nn.Module) -> bool:
    """Whether a module of the host's or torch's may compute otherwise than in evaluation mode."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    kinds = (nn.modules.batchnorm._NormBase, nn.RReLU)
    return type(module).__module__.startswith(("transformers.", "fastgen.")) or isinstance(module, kinds)


def unsupported_modules(everything: Iterable[nn.Module], attention: tuple[str | None, ...] = _ATTENTION) -> str | None:
    """Why a row may depend on other rows or on padding in a model with these modules; None if it does not.

    `attention`: the known implementations of attention.
    """
    for module in everything:
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return "dynamically quantised layers scale a row by the others of its batch"
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation not in attention:
            return f"attention implementation {implementation!r} has not been proven"
    return None
