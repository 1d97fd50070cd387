"""Runs the encoder with our linear layers and with little padding: rows of like length are read together.

Each group of rows is padded to its longest row. The encoders below mask padding on the right in every layer, and it
shifts no position, so the states of real positions are the same except for rounding. States of padding become zeros:
cross-attention masks them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen import config, phases, report
from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.transformers import expansion, foreign_code
from fastgen.optimizer.transformers.cache import encoded
from fastgen.optimizer.transformers.families import BASE_ENCODERS, ENCODER_HEADS, ENCODERS
from fastgen.optimizer.transformers.model import session as sessions
from fastgen.optimizer.transformers.model.facts import facts_of, unsupported_modules
from fastgen.optimizer.transformers.support import unsupported_configuration
from fastgen.replay.replayer import run_watching_draws

__phase__ = phases.ENCODER

# The inputs of `run`. Of an encoder's outputs those with three dimensions have positions, and these with two.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_SPANS = ("start_logits", "end_logits")
_SEARCHES = ("greedy_search", "sample", "beam_search", "beam_sample")
_MIN_SAVING = 0.1  # of the padded batch's cost
# The cost of one more group, in tokens. It reads all weights once more, which takes as long as multiplying some tens of
# tokens; besides, each layer's calls take time, worth so many multiplications by the layer's ~12 d^2 weights.
_WEIGHTS_TOKENS = 32
_CALLS_WEIGHTS = {"cpu": 2**23}
_CALLS_WEIGHTS_ELSEWHERE = 2**33  # an estimate: a GPU multiplies about a thousand times as fast as a core

Prepare = Callable[[Any, Any, dict[str, Any], Any, Any], dict[str, Any]]


def encode(
    stock: Prepare,
    model: Any,
    inputs: Tensor | None,
    model_kwargs: dict[str, Any],
    input_name: str | None,
    generation_config: Any,
) -> dict[str, Any]:
    """Run `stock`, the host's method that adds `encoder_outputs` to `model_kwargs`, once for each group of rows.

    `inputs`: tokens int64 `[B, N]`, or other inputs, which are read as one group; None if the model's own code has
        embedded the tokens.
    """
    if not isinstance(inputs, Tensor) or not _is_accelerated(model, generation_config, inputs):
        return stock(model, inputs, model_kwargs, input_name, generation_config)
    with sessions.multiplying(LinearDispatcher.configured(), model):
        if not _reads_rows_apart(model, inputs, model_kwargs, input_name):
            return stock(model, inputs, model_kwargs, input_name, generation_config)

        def read(inputs: Tensor, mask: Tensor) -> Any:
            part = {**model_kwargs, "attention_mask": mask}
            return stock(model, inputs, part, input_name, generation_config)["encoder_outputs"]

        def read_groups(inputs: Tensor, mask: Tensor) -> Any:
            groups = _split_by_length(model.get_encoder(), mask)
            if not groups:  # none of their own, or no rows at all
                return read(inputs, mask)
            return _joined(lambda rows, length: read(inputs[rows, :length], mask[rows, :length]), groups, inputs, model)

        model_kwargs["encoder_outputs"] = encoded.read(model, inputs, model_kwargs["attention_mask"], read_groups)
        return model_kwargs


def run(model: Any, inputs: Mapping[str, Any]) -> Any:
    """See `fastgen.encode`."""
    if config.current().tier == "stock":
        return model(**inputs)
    if reason := _unsupported(model, inputs):
        if config.current().strict:
            raise report.FallbackError(reason)
        report.log_once(f"{reason}; its padding is computed", type(model).__name__)
        return model(**inputs)
    with sessions.multiplying(LinearDispatcher.configured(), model):
        groups = _split_by_length(model, inputs["attention_mask"])
        if not groups:
            return model(**inputs)

        def read(rows: Tensor, length: int) -> Any:
            return model(**{name: value[rows, :length] for name, value in inputs.items()})

        return _joined(read, groups, inputs["input_ids"])


def _unsupported(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Why this model cannot read these inputs in groups, or None."""
    ids, base = inputs.get("input_ids"), getattr(model, "base_model", model)
    name = type(model).__name__
    head = name.removeprefix(type(base).__name__.removesuffix("Model"))
    if (
        type(base).__name__ not in BASE_ENCODERS
        or head not in ENCODER_HEADS
        or not (facts := facts_of(model)).is_hosts_own
    ):
        return f"{name} is none of the encoders that were compared with the padded call"
    if getattr(model.config, "is_decoder", False) or facts.is_watched:
        return f"{name} is used as a decoder, or has hooks or replaced parts"
    if reason := foreign_code.ambient_reason():
        return reason
    if facts.foreign:
        return f"{name} is not as the host made it: {facts.foreign[0]}"
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return "chunk_size_feed_forward divides texts by their padded length"
    if reason := unsupported_modules(model.modules(), (None, "eager", "sdpa")):
        return reason
    if model.training or torch.is_grad_enabled():
        return "the model is in training mode" if model.training else "gradients are enabled: use torch.no_grad()"
    asked = ("output_attentions", "output_hidden_states")
    if any(getattr(model.config, option, False) for option in asked) or not model.config.return_dict:
        return f"its configuration asks for one of {', '.join(asked)}, or for tuples"
    if unknown := sorted(set(inputs) - set(_INPUTS)):
        return f"{', '.join(unknown)} cannot be divided into groups"
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "attention_mask" not in inputs:
        return "it needs input_ids, one row for each text, and their attention_mask"
    if any(not isinstance(value, Tensor) or value.shape != ids.shape for value in inputs.values()):
        return f"not all of its inputs have the shape of input_ids, {tuple(ids.shape)}"
    if not _is_padded_right(inputs["attention_mask"]):
        return "a text is empty, or padded elsewhere than on the right"
    return None


def _joined(
    read: Callable[[Tensor, int], Any], groups: list[tuple[list[int], int]], ids: Tensor, drawing: Any = None
) -> Any:
    """Read each group by `read(rows, length)` and join the outputs, as if of one batch `ids`, `[B, N]`.

    `drawing`: the model whose encoder may draw random numbers, though in evaluation mode; None if it can't.
    """
    joined = None
    for rows, width in groups:
        index = torch.tensor(rows, device=ids.device)
        outputs = _drawn_once(functools.partial(read, index, width), drawing, joined is None)
        if joined is None:
            joined = type(outputs)(**{name: _room(name, value, *ids.shape) for name, value in outputs.items()})
        for name, value in outputs.items():
            if _has_positions(name, value):
                joined[name][index, :width] = value
            else:
                joined[name][index] = value
    report.note_encoder(sum(len(rows) * width for rows, width in groups), ids.numel())
    return joined


# By model: whether its encoder draws random numbers, though in evaluation mode. In some versions each layer draws one.
_drawing: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _drawn_once(read: Callable[[], Any], model: Any, is_first: bool) -> Any:
    """What `read` returns for one of several groups, with the random stream advanced as by one call for all of them.

    It is not put back in vain: other threads draw from the same stream, and would draw the same numbers again.
    """
    if model is None:
        return read()
    if is_first and model not in _drawing:
        outputs, _drawing[model] = run_watching_draws(read)
        return outputs
    with torch.random.fork_rng(devices=[], enabled=_drawing[model] and not is_first):
        return read()


def _room(name: str, value: Tensor, batch: int, length: int) -> Tensor:
    """Room for the output of all rows: zeros for states `[B, N, D]` or pooled `[B, D]`, the least number for spans."""
    if not _has_positions(name, value):
        return value.new_zeros(batch, *value.shape[1:])
    fill = torch.finfo(value.dtype).min if name in _SPANS else 0.0
    return value.new_full((batch, length, *value.shape[2:]), fill)


def _has_positions(name: str, value: Tensor) -> bool:
    return value.dim() == 3 or name in _SPANS


def _reads_rows_apart(model: Any, inputs: Tensor, kwargs: dict[str, Any], input_name: str | None) -> bool:
    """Whether no row's output depends on other rows or on padding: else the host has to read the batch as it is."""
    mask = kwargs.get("attention_mask")
    given = {name for name, value in kwargs.items() if value is not None and not name.startswith("decoder_")}
    if not given <= {"attention_mask", "use_cache", "labels"}:
        return False
    if input_name not in (None, "input_ids") or inputs.dtype != torch.int64 or inputs.dim() != 2:
        return False
    if not isinstance(mask, Tensor) or mask.shape != inputs.shape:
        return False
    encoder = model.get_encoder()
    if type(encoder).__name__ not in ENCODERS or not type(encoder).__module__.startswith("transformers.models."):
        return False
    if getattr(encoder.config, "chunk_size_feed_forward", 0):
        return False  # by which the host divides the length of the batch, and must be able to
    return _is_padded_right(mask) and not facts_of(model).is_encoder_watched


def _split_by_length(encoder: Any, mask: Tensor) -> list[tuple[list[int], int]] | None:
    """The groups of rows for a padding mask, `[B, N]`, of texts that are padded on the right."""
    weights = _CALLS_WEIGHTS.get(mask.device.type, _CALLS_WEIGHTS_ELSEWHERE)
    fixed = _WEIGHTS_TOKENS + weights / (12 * encoder.config.hidden_size**2)
    return split([int(length) for length in mask.sum(1).tolist()], mask.shape[1], fixed)


def _is_padded_right(mask: Tensor) -> bool:
    """Whether each row of the mask is ones followed by zeros, with at least one 1."""
    lengths = mask.sum(1)
    is_padded_right = mask == (torch.arange(mask.shape[1], device=mask.device) < lengths[:, None])
    return bool(is_padded_right.all() & (lengths > 0).all())


def split(lengths: Sequence[int], width: int, fixed: float) -> list[tuple[list[int], int]] | None:
    """The cheapest split of rows into groups, with the length of each; None if it hardly pays.

    The cost is the number of tokens multiplied, a group's rows times its length, and `fixed` for each group. Attention
    is left out: it is small below some thousand tokens, and would favour shorter groups, too. In the best split a group
    holds neighbours by length, and rows of equal length are together, so a dynamic programme over the different lengths
    finds it: the best split of the j shortest lengths is a last group behind the best split of the lengths before it.
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


def _is_accelerated(model: Any, generation_config: Any, inputs: Tensor) -> bool:
    """Whether the call will decode over the tree, as far as is known before the encoder has run."""
    rows = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    return (
        config.current().tier != "stock"
        and not expansion.is_decoded_by_users()
        and isinstance(model, torch.nn.Module)
        and foreign_code.ambient_reason() is None
        and generation_config.get_generation_mode() in _SEARCHES
        and generation_config.use_cache is not False
        and (rows > 1 or inputs.device.type == "cpu")
        and unsupported_configuration(model, generation_config) is None
        and (facts := facts_of(model)).unsupported is None
        and facts.is_hosts_own
        and not facts.foreign
        and not facts.foreign_in_encoder
    )
