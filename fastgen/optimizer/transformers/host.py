"""Where the host's versions differ at our seams: 5.x, and 4.57 with its older ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface

# 5.x asks one method for the attention function. 4.57 indexes a mapping, and asks nobody for eager attention.
ATTENTION_SEAM = "get_interface" if hasattr(AttentionInterface, "get_interface") else "__getitem__"
FINDS_EAGER = ATTENTION_SEAM == "get_interface"
# 5.x takes a finished mask of the source as it is; 4.57 builds it from the two-dimensional one.
TAKES_SOURCE_MASK = FINDS_EAGER
# 4.57 makes numbers of positions here and there.
COUNTS_IN_TENSORS = FINDS_EAGER
PREFILLS = hasattr(GenerationMixin, "_prefill")


def started(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The host's inputs as its loop has them before the prompt's forward pass."""
    if PREFILLS:
        return kwargs
    positioned: dict[str, Any] = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, dict(kwargs))
    return positioned


def prefill(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Any:
    """The prompt's forward pass."""
    if PREFILLS:
        return model._prefill(input_ids, config, kwargs, is_first_iteration=True)
    return model(**model.prepare_inputs_for_generation(input_ids, **kwargs), return_dict=True)


def next_inputs(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the forward pass for the last token of each row."""
    length = {"next_sequence_length": 1 if kwargs.get("use_cache") else None} if PREFILLS else {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(input_ids, **length, **kwargs)
    return inputs
