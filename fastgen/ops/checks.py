"""What every implementation of the operators asks of its arguments; csrc/arguments.h says the same in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TOKENS = (torch.int64, torch.int32)
_SCORES = (torch.float32, torch.float16, torch.bfloat16)
LONGEST = 1e18  # with rows or weights longer than this, sums may overflow: screening then computes all
PANEL = 64  # outputs side by side in a packed weight


def check_ngrams(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [rows, length], not of shape {list(tokens.shape)}.")
    if scores.dim() != 2 or scores.shape[0] != tokens.shape[0]:
        raise ValueError(f"scores must be [{tokens.shape[0]}, vocabulary], not of shape {list(scores.shape)}.")
    if tokens.dtype not in _TOKENS:
        raise TypeError(f"tokens must be int64 or int32, not {tokens.dtype}.")
    if scores.dtype not in _SCORES:
        raise TypeError(f"scores must be float32, float16 or bfloat16, not {scores.dtype}.")
    if tokens.device != scores.device:
        raise ValueError(f"tokens are on {tokens.device} and scores on {scores.device}.")
    if ngram_size < 1:
        raise ValueError(f"ngram_size must be 1 or more, not {ngram_size}.")
    if isinstance(length, torch.SymInt):  # in a compiled graph it may come from data, and be known when that runs
        torch._check_value(length >= 0, lambda: "length must not be negative.")
        torch._check_value(length <= tokens.shape[1], lambda: "length must not be beyond that of the tokens.")
    elif not 0 <= length <= tokens.shape[1]:
        raise ValueError(f"length must be 0 to {tokens.shape[1]}, not {length}.")
    if scores.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("scores that require a gradient can't be changed in place: call this under torch.no_grad().")


def check_no_overlap(scores: Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(scores.shape, scores.stride(), strict=True)):
        raise ValueError("scores must not be expanded: several of them share a place in memory.")


def check_source(source: Tensor, tokens: Tensor, beams: int) -> None:
    if beams < 1:
        raise ValueError(f"beams must be 1 or more, not {beams}.")
    if source.dim() != 2 or source.shape[0] * beams != tokens.shape[0]:
        raise ValueError(
            f"source must be [rows / beams, length], not of shape {list(source.shape)} "
            f"for {tokens.shape[0]} rows of {beams} beams."
        )
    if source.dtype not in _TOKENS:
        raise TypeError(f"source must be int64 or int32, not {source.dtype}.")
    if source.device != tokens.device:
        raise ValueError(f"source is on {source.device} and tokens on {tokens.device}.")


def check_topk(logits: Tensor, k: int, banned: Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be [rows, vocabulary], not of shape {list(logits.shape)}.")
    if logits.dtype not in _SCORES:
        raise TypeError(f"logits must be float32, float16 or bfloat16, not {logits.dtype}.")
    if logits.shape[1] >= 2**31:
        raise ValueError(f"the vocabulary is too large: {logits.shape[1]}.")
    if k < 1 or k > logits.shape[1]:
        raise ValueError(f"k must be 1 to {logits.shape[1]}, not {k}.")
    if banned is None:
        return
    if banned.dim() != 1 and (banned.dim() != 2 or banned.shape[0] != logits.shape[0]):
        raise ValueError(f"banned must be [width] or [{logits.shape[0]}, width], not of shape {list(banned.shape)}.")
    if banned.dtype != torch.int64:
        raise TypeError(f"banned must be int64, not {banned.dtype}.")
    if banned.device != logits.device:
        raise ValueError(f"banned is on {banned.device} and logits on {logits.device}.")


def check_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    if key.dim() != 4 or not key.shape[0] or not key.shape[1]:
        raise ValueError(f"key must be [batch, key heads, keys, size], not of shape {list(key.shape)}.")
    batch, key_heads, keys, size = key.shape
    rows, heads = query.shape[:2] if query.dim() == 4 else (1, 0)
    if query.dim() != 4 or rows % batch or heads % key_heads or query.shape[2:] != (1, size):
        raise ValueError(
            f"query must be [{batch} * beams, heads, 1, {size}], heads a multiple of {key_heads}, "
            f"not of shape {list(query.shape)}."
        )
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must be [{batch}, {key_heads}, {keys}, size], not of shape {list(value.shape)}.")
    shape = (batch, heads, rows // batch, keys)
    if bias is not None and (
        bias.dim() != 4 or any(have not in (1, want) for have, want in zip(bias.shape, shape, strict=True))
    ):
        raise ValueError(f"bias must be broadcastable to {list(shape)}, not of shape {list(bias.shape)}.")
    _check_floats("query is", query, ("query", query), ("key", key), ("value", value), ("bias", bias))


def check_skinny(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    if not weights:
        raise ValueError("weights must be one tensor or more.")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != rows.shape[-1]:
            raise ValueError(f"weights must be [width, {rows.shape[-1]}], not of shape {list(weight.shape)}.")
    width = sum(weight.shape[0] for weight in weights)
    _check_width("bias", bias, width)
    _check_floats("rows are", rows, ("rows", rows), ("bias", bias))
    _check_floats("rows are", rows, *(("weights", weight) for weight in weights), or_half=True)


def check_screened(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    if weight.dim() != 2 or weight.shape[1] != rows.shape[-1]:
        raise ValueError(f"weight must be [width, {rows.shape[-1]}], not of shape {list(weight.shape)}.")
    if codes.shape != weight.shape:
        raise ValueError(f"codes must be {list(weight.shape)}, not of shape {list(codes.shape)}.")
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be int8, not {codes.dtype}.")
    if codes.device != rows.device:
        raise ValueError(f"rows are on {rows.device} and codes on {codes.device}.")
    for name, tensor in (("scales", scales), ("errors", errors), ("bias", bias)):
        _check_width(name, tensor, weight.shape[0])
    named = ("rows", rows), ("weight", weight), ("scales", scales), ("errors", errors), ("bias", bias)
    _check_floats("rows are", rows, *named)


def check_probabilities(probabilities: Tensor) -> None:
    if probabilities.dim() != 2:
        raise ValueError(f"probabilities must be [rows, vocabulary], not of shape {list(probabilities.shape)}.")
    if probabilities.dtype != torch.float32:
        raise TypeError(f"probabilities must be float32, not {probabilities.dtype}.")


def check_fingerprint(tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"tensor must be [rows, size], not of shape {list(tensor.shape)}.")


def check_packed(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> None:
    if not rows.dim():
        raise ValueError(f"rows must be [..., size], not of shape {list(rows.shape)}.")
    shape = (-(-width // PANEL), rows.shape[-1], PANEL)
    if width < 0 or packed.shape != shape:
        raise ValueError(f"packed must be {list(shape)}, not of shape {list(packed.shape)}.")
    _check_width("bias", bias, width)
    _check_floats("rows are", rows, ("rows", rows), ("packed", packed), ("bias", bias))


def _check_width(name: str, tensor: Tensor | None, width: int) -> None:
    if tensor is not None and tensor.shape != (width,):
        raise ValueError(f"{name} must be [{width}], not of shape {list(tensor.shape)}.")


def _check_floats(whose: str, like: Tensor, *tensors: tuple[str, Tensor | None], or_half: bool = False) -> None:
    for name, tensor in tensors:
        if tensor is not None and tensor.dtype != torch.float32 and not (or_half and tensor.dtype == torch.float16):
            raise TypeError(f"{name} must be float32{' or float16' if or_half else ''}, not {tensor.dtype}.")
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{whose} on {like.device} and {name} on {tensor.device}.")
