"""What published checkpoints call their weights, and pretrained ones to begin training with."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

_X_SEP, _SEP = 2, 102  # BERT's numbers of the two separators


def rename(state_dict: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Give the weights whose names go on after `prefix` with one of `names` the new one, in place."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        for old, new in names.items():
            if rest.startswith(old):
                state_dict[f"{prefix}{new}{rest[len(old) :]}"] = state_dict.pop(key)


def load_pretrained(model: Any, path: str, is_sep_doubled: bool) -> None:
    """Begin with the weights in the file `path`: a checkpoint, or a state dict alone.

    `is_sep_doubled`: [X_SEP], which ended sentences when the model was trained, becomes a copy of [SEP]'s embedding.
    Raises RuntimeError if the weights are of another shape.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(path, map_location="cpu", weights_only=True)
    weights = dict(state.get("model", state))
    if model.decoder.share_input_output_embed:
        weights.pop("decoder.output_projection.weight", None)  # is the embedding
    if is_sep_doubled:
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            weights[name] = weights[name].clone()
            weights[name][_X_SEP] = weights[name][_SEP]
    model.load_state_dict(weights)
