"""Which searches have so many beams that each beam's attention to its own path alone pays."""

from __future__ import annotations

from typing import Any

import torch

from fastgen.cache.slim.latent import Choice
from fastgen.cache.tree import BeamTree
from fastgen.cache.wide_tree import WIDE_FROM, WideTree
from fastgen.ops import native_operator
from fastgen.optimizer.fairseq.model.streams import has_streams
from fastgen.optimizer.fairseq.request import Request, has_own_code


def tree_class(request: Request, choice: Choice) -> type[BeamTree]:
    """The tree that the request's search runs over: a `WideTree` for many beams, on the CPU in float32.

    `choice`: which caches are slim.
    """
    source = request.source
    assert source is not None
    if request.beams < WIDE_FROM or source.device.type != "cpu" or choice.self_attn != "kv":
        return BeamTree
    if native_operator("path_attention") is None:
        return BeamTree
    if has_own_code(request.generator):
        return BeamTree  # such code may give padding a score, and a path hides nothing
    if (prefix := request.prefix_tokens) is not None and bool(prefix.eq(request.generator.eos).any()):
        return BeamTree  # all beams end there, also those that are fed padding, which a path does not hide
    return WideTree if all(_is_plain(model.decoder) for model in request.generator.model.models) else BeamTree


def _is_plain(decoder: Any) -> bool:
    """Whether the decoder is in float32, and has but one stream."""
    return not has_streams(decoder) and all(weight.dtype == torch.float32 for weight in decoder.parameters())
