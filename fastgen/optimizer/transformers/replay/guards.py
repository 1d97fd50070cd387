"""Guards that tell whether a model of transformers is still as it was when steps were captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fastgen.optimizer.transformers.model import modules
from fastgen.patching.patch_set import unpatched
from fastgen.replay.guards import Host, ModelGuards

_INTERFACES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)


def _registered() -> list[dict[str, Any]]:
    """The registered attention functions and mask functions."""
    found = [dict(names) for one in _INTERFACES for names in (one._global_mapping, one._local_mapping)]
    return [*found, unpatched(AttentionInterface)]


_HOST = Host(
    packages=("transformers", "fastgen"),
    configs=(PretrainedConfig,),
    ignored=(GenerationConfig,),
    not_of_the_step=("transformers.generation.",),
    class_attributes=unpatched,
    registered=_registered,
)


_WITH_SEARCH = dataclasses.replace(_HOST, not_of_the_step=())


def guards_of_steps(model: nn.Module) -> ModelGuards:
    """Guards of all that the model's steps may read."""
    return ModelGuards(modules.decoder_modules(model), _HOST)


def guards_of(everything: Iterable[nn.Module]) -> ModelGuards:
    """Guards of all that these modules, and the host's search, may read."""
    return ModelGuards(everything, _WITH_SEARCH)
