"""The encoder with products of our own, and without padding: rows of like length are read together, each group as
long as its longest row.

Padding on the right is masked in every layer of the encoders below and shifts no position, so the states of the real
positions are the same but for rounding. Those of padding become zeros: cross-attention masks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen import config, report
from fastgen.decoding.watched import is_watched
from fastgen.optimizer.transformers import session as sessions
from fastgen.optimizer.transformers.modules import is_the_hosts_own
from fastgen.optimizer.transformers.requests import unsupported_configuration, unsupported_model
from fastgen.products import Products

# Compared with the padded call by the test suite. Padding must reach nothing: no convolution, no blocks of positions,
# no experts that a batch shares.
_ENCODERS = frozenset(
    """BartEncoder BertGenerationEncoder BertModel BlenderbotEncoder M2M100Encoder MarianEncoder MBartEncoder MT5Stack
    PegasusEncoder T5Stack UMT5Stack""".split()
)
_SEARCHES = ("greedy_search", "sample", "beam_search", "beam_sample")
_MIN_SAVING = 0.1  # of the padded batch's cost
# What one more group costs, in tokens. Its products read all weights once more, which takes as long as multiplying
# some tens of tokens; besides, each layer's calls cost time, worth that many multiplications of its ~12 d^2 weights.
_WEIGHTS_TOKENS = 32
_CALLS_WEIGHTS = {"cpu": 2**23}
_CALLS_WEIGHTS_ELSEWHERE = 2**33  # an estimate: a GPU multiplies about a thousand times as fast as a core

Prepare = Callable[[Any, Tensor, dict[str, Any], Any, Any], dict[str, Any]]


def encode(
    stock: Prepare,
    model: Any,
    inputs: Tensor,
    model_kwargs: dict[str, Any],
    input_name: str | None,
    generation_config: Any,
) -> dict[str, Any]:
    """`stock`, the host's method that adds `encoder_outputs` to `model_kwargs`, once for each group of rows.

    `inputs`: tokens int64 `[B, N]`, or whatever the model reads; all but tokens is read as one group.
    """
    if not _is_accelerated(model, generation_config, inputs.device):
        return stock(model, inputs, model_kwargs, input_name, generation_config)
    with sessions.multiplying(Products(config.current().packing), model):
        groups = _groups(model, inputs, model_kwargs, input_name)
        if groups is None:
            return stock(model, inputs, model_kwargs, input_name, generation_config)
        return _encode_groups(stock, model, inputs, model_kwargs, input_name, generation_config, groups)


def _encode_groups(
    stock: Prepare,
    model: Any,
    inputs: Tensor,
    model_kwargs: dict[str, Any],
    input_name: str | None,
    generation_config: Any,
    groups: list[tuple[list[int], int]],
) -> dict[str, Any]:
    mask, joined = model_kwargs["attention_mask"], None
    for rows, length in groups:
        index = torch.tensor(rows, device=inputs.device)
        part = {**model_kwargs, "attention_mask": mask[index, :length]}
        # Some encoders draw a number for each layer even in evaluation mode: the random stream sees one call.
        with torch.random.fork_rng(devices=[], enabled=joined is not None):
            outputs = stock(model, inputs[index, :length], part, input_name, generation_config)["encoder_outputs"]
        if joined is None:
            joined = type(outputs)(**{name: _room(value, *inputs.shape) for name, value in outputs.items()})
        for name, value in outputs.items():
            if value.dim() == 3:
                joined[name][index, :length] = value
            else:
                joined[name][index] = value
    report.note_encoder(sum(len(rows) * length for rows, length in groups), inputs.numel())
    model_kwargs["encoder_outputs"] = joined
    return model_kwargs


def _room(value: Tensor, batch: int, length: int) -> Tensor:
    """Zeros for all rows: states `[B, N, D]`, or a pooled `[B, D]`."""
    return value.new_zeros((batch, length, *value.shape[2:]) if value.dim() == 3 else (batch, *value.shape[1:]))


def _groups(
    model: Any, inputs: Tensor, kwargs: dict[str, Any], input_name: str | None
) -> list[tuple[list[int], int]] | None:
    """The rows and the length of each group; None where the host has to read the batch as it is."""
    mask = kwargs.get("attention_mask")
    given = {name for name, value in kwargs.items() if value is not None and not name.startswith("decoder_")}
    if not given <= {"attention_mask", "use_cache"}:
        return None
    if input_name not in (None, "input_ids") or inputs.dtype != torch.int64 or inputs.dim() != 2:
        return None
    if not isinstance(mask, Tensor) or mask.shape != inputs.shape:
        return None
    encoder = model.get_encoder()
    if type(encoder).__name__ not in _ENCODERS or not type(encoder).__module__.startswith("transformers.models."):
        return None
    lengths = mask.sum(1)
    is_padded_right = mask == (torch.arange(mask.shape[1], device=mask.device) < lengths[:, None])
    if not bool(is_padded_right.all() & (lengths > 0).all()):
        return None
    weights = _CALLS_WEIGHTS.get(inputs.device.type, _CALLS_WEIGHTS_ELSEWHERE)
    fixed = _WEIGHTS_TOKENS + weights / (12 * encoder.config.hidden_size**2)
    groups = split([int(length) for length in lengths.tolist()], inputs.shape[1], fixed)
    return None if groups is None or is_watched(encoder.modules()) else groups


def split(lengths: Sequence[int], width: int, fixed: float) -> list[tuple[list[int], int]] | None:
    """The split of rows into groups, with the length of each, that costs least; None if it hardly pays.

    Cost counts the tokens multiplied: a group's rows times its length, and `fixed` for the group. Attention's share
    is left out: it is small below some thousand tokens, and what it adds speaks for shorter groups too. In the best
    split groups are neighbours by length, and rows of equal length are together, so a dynamic programme over the
    different lengths finds it: the best split of the shorter ones is a group, up to each, behind a best split of the
    still shorter ones.
    """
    by_length: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        by_length.setdefault(lengths[row], []).append(row)
    distinct = list(by_length)
    best, last = [0.0], [0]  # of the first j lengths: the cost, and where the last group begins
    for j, length in enumerate(distinct):
        costs, rows = [], 0
        for i in range(j, -1, -1):
            rows += len(by_length[distinct[i]])
            costs.append((best[i] + rows * length + fixed, i))
        cost, begin = min(costs)
        best.append(cost)
        last.append(begin)
    if best[-1] > (1 - _MIN_SAVING) * (len(lengths) * width + fixed):
        return None
    groups: list[tuple[list[int], int]] = []
    j = len(distinct)
    while j:
        begin = last[j]
        groups.append(([row for length in distinct[begin:j] for row in by_length[length]], distinct[j - 1]))
        j = begin
    return groups


def _is_accelerated(model: Any, generation_config: Any, device: torch.device) -> bool:
    """Whether the call, as far as it is known before the encoder has run, will decode over the tree."""
    rows = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    return (
        config.current().tier != "stock"
        and generation_config.get_generation_mode() in _SEARCHES
        and generation_config.use_cache is not False
        and (rows > 1 or device.type == "cpu")
        and unsupported_configuration(model, generation_config) is None
        and unsupported_model(model) is None
        and is_the_hosts_own(model)
    )
