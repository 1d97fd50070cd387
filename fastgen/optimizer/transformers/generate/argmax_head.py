"""Which greedy searches need no more of the logits than their largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation import utils

from fastgen import phases
from fastgen.optimizer.transformers.request import Request
from fastgen.patching.replaced_code import is_replaced

__phase__ = phases.LOOP

_MIN_STEPS = 12  # a head's codes are made once, but somebody may generate only once, and a word or two
# Between the head and the choice, what sees the model's output.
_BETWEEN = ("forward", "__call__", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def may_use_argmax_head(request: Request, stock: Callable[..., Any]) -> bool:
    """Whether nobody else looks at the logits of this call; `stock` is the host's `_sample`."""
    model, steps = request.model, request.generation_config.max_length - request.input_ids.shape[1]
    return (
        request.wants_best_only
        and steps >= _MIN_STEPS
        and not request.calls_back
        and not request.foreign
        and request.facts.is_tested
        and getattr(stock, "__globals__", None) is vars(utils)
        and not any(name in vars(model) or is_replaced(type(model), name) for name in _BETWEEN)
        and not request.facts.is_watched
    )
