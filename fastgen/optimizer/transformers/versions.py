"""Differences between versions of the host where we patch it, found by what the host has, not by version number.

5.24 calls a cache `cache`, in inputs and outputs alike; earlier versions call it `past_key_values`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.modeling_utils import AttentionInterface

from fastgen import phases

# 5.x asks one method for the attention function. 4.57 indexes a mapping, and looks eager attention up nowhere.
ATTENTION_SEAM = "get_interface" if hasattr(AttentionInterface, "get_interface") else "__getitem__"
FINDS_EAGER = ATTENTION_SEAM == "get_interface"
# 5.x takes a finished mask of the source as it is; 4.57 builds it from the two-dimensional one.
TAKES_SOURCE_MASK = FINDS_EAGER
# 4.57 turns positions into Python numbers in some places.
COUNTS_IN_TENSORS = FINDS_EAGER
PREFILLS = hasattr(GenerationMixin, "_prefill")


def _named(fields: Container[str], *names: str) -> str:
    """The first of `names` that is among the fields; ImportError, which leaves the host alone, if none is."""
    for name in names:
        if name in fields:
            return name
    raise ImportError(f"the outputs of generate have no {' or '.join(names)}")


# The name of the cache in a model's inputs and outputs, and in the outputs of `generate`.
CACHE = _named([field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)], "cache", "past_key_values")
OLD_CACHE = "past_key_values"
# The parameter by which some position embeddings get the number of positions in the cache.
CACHE_LENGTH = f"{CACHE}_length"
# In some layers the cache parameter has an older name.
CACHE_PARAMETERS = ("cache", "past_key_values", "past_key_value", "layer_past", "layer_state")


def takes_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a model's method that has a parameter `cache`: to the host it has the host's own name.

    The method takes the older name, too, as the host's own models do.
    """
    signature = inspect.signature(function)
    parameters = [each.replace(name=CACHE) if each.name == "cache" else each for each in signature.parameters.values()]

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if OLD_CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(OLD_CACHE)
        return function(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


def _code_of(method: str) -> Any:
    """The code of a method of the host's GenerationMixin; None if there is no such method, or no code of Python's."""
    found = getattr(GenerationMixin, method, None)
    return None if found is None else getattr(inspect.unwrap(found), "__code__", None)


def sorts_drawn() -> bool:
    """Whether beam sampling sorts the drawn candidates by score, as it does from 5.24 on."""
    code = _code_of("_get_top_k_continuations")
    return code is not None and "sort" in code.co_names


def chunks_the_rest() -> bool:
    """Whether a prompt that is read in chunks begins where a cache ends, as from 5.23 on; else all of it is read."""
    code = _code_of("_prefill")
    return code is not None and "prefill_ids" in code.co_varnames


def penalty_ignores_padding() -> bool:
    """Whether the host's repetition penalty leaves out the padding of a prompt, as newer versions do."""
    code = _code_of("_get_logits_processor")
    return code is not None and "padding_lengths" in code.co_varnames


def penalises_all_rows() -> bool:
    """Whether the host's penalty on tokens of the source reaches all rows of a source, as in newer versions."""
    code = getattr(logits_process.EncoderRepetitionPenaltyLogitsProcessor.__call__, "__code__", None)
    return code is not None and "repeat_interleave" in code.co_names


def decays_finite_scores() -> bool:
    """Whether the host's exponential decay leaves banned ends alone, as in newer versions; else they become NaN."""
    code = getattr(logits_process.ExponentialDecayLengthPenalty.__call__, "__code__", None)
    return code is not None and "isfinite" in code.co_names


def started(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The host's inputs as the host's loop has them before the forward pass of the prompt."""
    if PREFILLS:
        return kwargs
    positioned: dict[str, Any] = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, dict(kwargs))
    return positioned


@phases.marked(phases.PREFILL)
def prefill(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Any:
    """Run the forward pass of the prompt."""
    if PREFILLS:
        return model._prefill(input_ids, config, kwargs, is_first_iteration=True)
    return model(**model.prepare_inputs_for_generation(input_ids, **kwargs), return_dict=True)


def next_inputs(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the forward pass for the last token of each row."""
    length = {"next_sequence_length": 1 if kwargs.get("use_cache") else None} if PREFILLS else {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(input_ids, **length, **kwargs)
    return inputs
