"""Renames weights of published checkpoints, and loads pretrained weights to begin training with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastgen.optimizer.fairseq.checkpoints import allowed

_X_SEP, _SEP = 2, 102  # BERT's numbers of the two separators

_TABLES = {"source": "encoder.embed_positions.weight", "target": "decoder.embed_positions.weight"}


def rename(state_dict: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Rename, in place, weights whose name begins with `prefix` and one of `names`, to `prefix` and the new name."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        for old, new in names.items():
            if rest.startswith(old):
                state_dict[f"{prefix}{new}{rest[len(old) :]}"] = state_dict.pop(key)


def load_pretrained(model: Any, path: str, is_sep_doubled: bool) -> None:
    """Load the weights in the file `path`, a checkpoint or a state dict, into `model`.

    `is_sep_doubled`: the embedding of [X_SEP], which ended sentences in training, becomes a copy of [SEP]'s. Tables of
    positions are cut to the lengths that the model has.

    Raises ValueError if these tables are shorter, and RuntimeError if other weights have another shape.
    """
    with allowed():  # for the other content of a checkpoint
        state = torch.load(path, map_location="cpu", weights_only=True)
    weights = dict(state.get("model", state))
    if model.decoder.share_input_output_embed:
        weights.pop("decoder.output_projection.weight", None)  # the embedding is used in its place
    if is_sep_doubled:
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            weights[name] = weights[name].clone()
            weights[name][_X_SEP] = weights[name][_SEP]
    for side, table in _TABLES.items():
        wanted, found = model.state_dict()[table].shape[0], len(weights[table])
        if found < wanted:
            raise ValueError(f"--max-{side}-positions asks for {wanted - found} positions more than {path} has.")
        weights[table] = weights[table][:wanted]
    model.load_state_dict(weights)
