"""Whether a model of transformers is still what it was."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.model import modules
from fastgen.replay.guards import Host, Snapshot

_INTERFACES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)


def _registered() -> list[dict[str, Any]]:
    """The functions of attention and of its masks."""
    return [dict(names) for one in _INTERFACES for names in (one._global_mapping, one._local_mapping)]


_HOST = Host(
    configs=(PretrainedConfig,),
    ignored=(GenerationConfig,),
    not_of_the_step=("transformers.generation.",),
    class_attributes=interception.stock_attributes,
    registered=_registered,
)


def snapshot(model: nn.Module) -> Snapshot:
    """Of what the model's steps may read."""
    return Snapshot(modules.of_steps(model), _HOST)
