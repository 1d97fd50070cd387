"""How long a hypothesis may be, and what ends it.

The stopping criteria of a call say so: the user's may stand in place of those that the host makes of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


def longest(criteria: Iterable[Any]) -> int | None:
    """The most tokens of a row; None if no criterion names a number."""
    return min((one.max_length for one in criteria if type(one) is MaxLengthCriteria), default=None)


def are_of(config: Any, criteria: Iterable[Any]) -> bool:
    """Whether these criteria, of end tokens and lengths alone, are those that the host makes of the configuration."""
    ends = config._eos_token_tensor
    found = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    have_ends = not found if ends is None else bool(found) and all(one is ends for one in found)
    return have_ends and longest(criteria) == config.max_length


def positions(model: Any) -> float:
    """How many positions the model has, by its config; perhaps more."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    found = [value for name in names if isinstance(value := getattr(config, name, None), int)]
    return min(found, default=math.inf)


def remind(criteria: Iterable[Any], length: int, like: Tensor) -> None:
    """Let the host say once that hypotheses outgrow the model's positions: its criterion does, if it is asked.

    `like`: any tensor on the hypotheses' device.
    """
    for one in criteria:
        known = getattr(one, "max_position_embeddings", None)
        if type(one) is MaxLengthCriteria and known and length >= known:
            one(like.new_empty(0, length), None)
