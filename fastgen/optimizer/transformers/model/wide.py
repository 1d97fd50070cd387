"""Which searches have so many beams that each beam's attention to its own path alone pays."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.cache.tree import BeamTree
from fastgen.cache.wide_tree import WIDE_FROM, WideTree
from fastgen.ops import native_operator
from fastgen.optimizer.transformers.model.modules import decoder_modules
from fastgen.optimizer.transformers.request import Request


def is_wide(request: Request) -> bool:
    """Whether the search runs over a `WideTree`: many beams, on the CPU in float32, by torch's own attention."""
    model, facts = request.model, request.facts
    if request.beams < WIDE_FROM or request.input_ids.device.type != "cpu" or model.dtype != torch.float32:
        return False
    if not facts.is_tested or facts.folding or native_operator("path_attention") is None:
        return False
    configs = (getattr(module, "config", None) for module in decoder_modules(model))
    return all(getattr(config, "_attn_implementation", None) in (None, "sdpa") for config in configs)


def mask_for_model(tree: BeamTree) -> Tensor:
    """Which slots each beam sees, bool `[B, M, width]`, as the model gets it; with a `WideTree` nothing reads it."""
    return tree.everything() if isinstance(tree, WideTree) else tree.ancestry()
