"""Finds and converts published checkpoints of UniLM.

unilm-v1 and s2s-ft save weights under BERT's names, with further weights of the training: a pooler, the head for the
next sentence, losses, a second head. Older files call LayerNorm's weights gamma and beta, and may hold four copies of
some weights, one for each kind of language model that UniLM was trained as.
"""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastgen.models.unilm.configuration import UnilmConfig

_WEIGHTS = "pytorch_model.bin"
_CONFIGURATIONS = ("config.json", "bert_config.json")
_OTHERS_FILES = ("model.safetensors", "model.safetensors.index.json", f"{_WEIGHTS}.index.json")
_FIELDS = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act
    hidden_dropout_prob attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range
    layer_norm_eps mask_token_id source_type_id target_type_id rel_pos_bins""".split()
# Arguments that `AutoModelForCausalLM` passes on, and that a local file doesn't need.
_OF_THE_HUB = (
    "_from_auto adapter_kwargs cache_dir force_download local_files_only revision token trust_remote_code".split()
)
# Weights that decoding doesn't use. The decoder shares the weight of the word embeddings.
_UNUSED = re.compile(
    r"bert\.pooler\.|bert\.embeddings\.position_ids|cls\.seq_relationship\.|cls\.predictions\.decoder|cls2\.|crit_"
    r"|secondary_pred_proj\."
)
_REFUSED = {
    "rel_pos_bias": "UniLM v2's relative positions",
    "b_q_s": "segment embeddings in attention (seg_emb)",
    "seg_emb": "segment embeddings in attention (seg_emb)",
    ".ffn.": "multiplicative feed-forward layers (ffn_type)",
    "qkv_linear": "fused projections",
}
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_SEGMENTS = "bert.embeddings.token_type_embeddings.weight"
_TRANSFORM = "cls.predictions.transform."
_TASK = 3  # sequence to sequence; the others are bidirectional, left to right, right to left
_SEGMENT_SOURCES = (0, 1, 0, 0, 0, 1, 1)  # the segment of BERT from which each segment is made


def published_file(path: Any) -> str | None:
    """The published file of weights at `path` or in that folder; None if the host has to load `path`."""
    path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if os.path.isfile(path):
        return path
    file = os.path.join(path, _WEIGHTS)
    if not os.path.isfile(file) or any(os.path.exists(os.path.join(path, name)) for name in _OTHERS_FILES):
        return None
    # Older hosts save our models under this name, too. Published configurations leave this token to the tokenizer.
    return None if "mask_token_id" in _fields(os.path.join(path, "config.json")) else file


def configuration(
    file: str, config: Any = None, dtype: Any = None, torch_dtype: Any = None, **fields: Any
) -> tuple[UnilmConfig, Any]:
    """The configuration for a file of weights, with these fields changed, and the dtype, float32 by default."""
    folder = os.path.dirname(file)
    if not isinstance(config, UnilmConfig):
        paths = [os.path.join(folder, name) for name in _CONFIGURATIONS] if config is None else [os.fspath(config)]
        published = next((found for path in paths if (found := _fields(path))), None)
        if published is None:
            raise FileNotFoundError(f"{file} needs a configuration: there is no {' and no '.join(paths)}.")
        # Other fields are of the training, or defaults of old versions of the host.
        config = UnilmConfig(**{name: published[name] for name in _FIELDS if published.get(name) is not None})
    config = copy.deepcopy(config)
    fields = {name: value for name, value in fields.items() if name not in _OF_THE_HUB}
    if unknown := sorted(set(fields) - set(config.to_dict())):
        raise TypeError(f"A published checkpoint is not loaded with {', '.join(unknown)}.")
    config.update(fields)
    if not config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=False: a published checkpoint has no weights of the decoder's own.")
    dtype = torch_dtype if dtype is None else dtype
    if isinstance(dtype, str) and dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"dtype={dtype!r} is no dtype of torch.")
        dtype = named
    return config, torch.float32 if dtype is None else dtype


def _fields(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as lines:
        fields: dict[str, Any] = json.load(lines)
    return fields


def converted(
    weights: Mapping[str, Tensor], config: UnilmConfig, shapes: Mapping[str, torch.Size], file: str
) -> dict[str, Tensor]:
    """The weights with the names and sizes in `shapes`, the `untied_shapes` of a model of this configuration.

    Tables of segments and positions that are too short are filled up as unilm-v1 does: segments by copies of BERT's
    two, positions by repeating the table. Tables that are too long are cut.

    Raises:
        ValueError: if weights are missing, unknown, of another size, or of a kind that isn't supported.
    """
    weights = {_renamed(name): tensor for name, tensor in weights.items()}
    for name in weights:
        if kind := next((kind for part, kind in _REFUSED.items() if part in name), None):
            raise ValueError(f"{file} has {kind}, which are not supported ({name}).")
    weights = {name: tensor for name, tensor in weights.items() if not _UNUSED.match(name)}
    for layer in range(config.num_hidden_layers):
        # The published decoder reads no key bias: it would add the same number to all scores of a query.
        name = f"bert.encoder.layer.{layer}.attention.self.key."
        if f"{name}weight" in weights and f"{name}bias" not in weights:
            weights[f"{name}bias"] = torch.zeros(config.hidden_size, device="cpu")
    if missing := [name for name in shapes if name not in weights]:
        raise ValueError(f"{file} lacks {_listed(missing)}.")
    if unknown := [name for name in weights if name not in shapes]:
        raise ValueError(f"{file} has weights that UniLM has no place for: {_listed(unknown)}.")
    _keep_task(weights, config.hidden_size)
    segments = weights[_SEGMENTS]
    if len(segments) < config.type_vocab_size <= len(_SEGMENT_SOURCES):
        made = segments[list(_SEGMENT_SOURCES[len(segments) : config.type_vocab_size])]
        weights[_SEGMENTS] = torch.cat([segments, made])
    if len(segments) > config.type_vocab_size:
        text = f"{file} has {len(segments)} segments, and type_vocab_size is {config.type_vocab_size}: fine-tuned with "
        text += "--new_segment_ids it needs type_vocab_size=6, source_type_id=4, target_type_id=5."
        warnings.warn(text, stacklevel=3)
    weights[_SEGMENTS] = weights[_SEGMENTS][: config.type_vocab_size]
    positions = weights[_POSITIONS]
    if len(positions) > config.max_position_embeddings:
        text = f"{file} has {len(positions)} positions, and max_position_embeddings is {config.max_position_embeddings}"
        warnings.warn(f"{text}: source and target together can have no more.", stacklevel=3)
    repeats = -(-config.max_position_embeddings // len(positions))
    weights[_POSITIONS] = positions.repeat(repeats, 1)[: config.max_position_embeddings]
    if wrong := [name for name, shape in shapes.items() if weights[name].shape != shape]:
        sizes = f"{tuple(weights[wrong[0]].shape)} instead of {tuple(shapes[wrong[0]])}"
        raise ValueError(f"{file} doesn't fit its configuration: {_listed(wrong)} ({sizes}).")
    return weights


def _renamed(name: str) -> str:
    name = name.removeprefix("module.")  # of torch's DataParallel
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def _keep_task(weights: dict[str, Tensor], size: int) -> None:
    """Replace weights that hold a copy for each task by the copy for sequence to sequence, in place."""
    positions = weights[_POSITIONS]
    if positions.shape[1] == 4 * size:
        weights[_POSITIONS] = positions.unflatten(1, (4, size))[:, _TASK]
    if weights[f"{_TRANSFORM}dense.weight"].shape[0] == 4 * size:
        for name in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias"):
            weights[_TRANSFORM + name] = weights[_TRANSFORM + name].unflatten(0, (4, size))[_TASK]


def untied_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """The shapes of weights that a checkpoint must have: all but the decoder's, which are shared with others."""
    return {name: tensor.shape for name, tensor in model.state_dict().items() if not _UNUSED.match(name)}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
