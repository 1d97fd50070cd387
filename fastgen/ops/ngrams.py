"""Bans tokens that would repeat an n-gram, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.checks import SCORES, TOKENS
from fastgen.ops.operator import define


def ban_repeated_ngrams_(tokens: Tensor, scores: Tensor, ngram_size: int, length: int | None = None) -> None:
    """Ban every token that would complete an n-gram a second time in its row: its score becomes -inf, in place.

    The ban of Paulus et al. 2017 (https://arxiv.org/abs/1705.04304, section 2.5), after algorithm 1 of FastSeq (Yan et
    al. 2021, https://arxiv.org/abs/2106.04718); equal to transformers' `NoRepeatNGramLogitsProcessor` on
    `tokens[:, :length]`.

    Args:
        tokens: int64 or int32 `[rows, L]`, what was generated so far; may be a buffer that is longer than `length`.
        scores: float32, float16 or bfloat16 `[rows, V]`, logits or log-probabilities; any strides, but not expanded.
        ngram_size: n, 1 or more; 1 bans every token of the row.
        length: how many tokens of each row count, 0 to L; all of them by default. Below n, nothing is banned.

    Tokens outside 0 to V - 1 ban nothing.

    Raises:
        ValueError: for shapes, devices or numbers other than these.
        TypeError: for other dtypes.
        RuntimeError: if `scores` requires a gradient and gradients are on: the ban passes none on.
    """
    check_no_gradient(scores)
    _ban_repeated_ngrams(tokens, scores, ngram_size, tokens.shape[-1] if length is None else length)


def ban_source_ngrams_(
    source: Tensor, tokens: Tensor, scores: Tensor, ngram_size: int, length: int | None = None, beams: int = 1
) -> None:
    """Ban every token that would complete an n-gram of the source: its score becomes -inf, in place.

    Equal to transformers' `EncoderNoRepeatNGramLogitsProcessor` on `tokens[:, :length]`: padding in the source counts
    as any token.

    Args:
        source: int64 or int32 `[rows / beams, N]`; row `i` belongs to the rows `i * beams` to `(i + 1) * beams - 1`.
        tokens: int64 or int32 `[rows, L]`, what was generated so far; may be a buffer that is longer than `length`.
        scores: float32, float16 or bfloat16 `[rows, V]`, logits or log-probabilities; any strides, but not expanded.
        ngram_size: n, 1 or more; 1 bans every token of the source.
        length: how many tokens of each row count, 0 to L; all of them by default. Below n - 1, nothing is banned.
        beams: rows that share a source.

    Tokens outside 0 to V - 1 ban nothing.

    Raises:
        ValueError: for shapes, devices or numbers other than these.
        TypeError: for other dtypes.
        RuntimeError: if `scores` requires a gradient and gradients are on: the ban passes none on.
    """
    check_no_gradient(scores)
    length = tokens.shape[-1] if length is None else length
    _ban_source_ngrams(source, tokens, scores, ngram_size, length, beams)


def check_ngrams(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [rows, length], not of shape {list(tokens.shape)}.")
    if scores.dim() != 2 or scores.shape[0] != tokens.shape[0]:
        raise ValueError(f"scores must be [{tokens.shape[0]}, vocabulary], not of shape {list(scores.shape)}.")
    if tokens.dtype not in TOKENS:
        raise TypeError(f"tokens must be int64 or int32, not {tokens.dtype}.")
    if scores.dtype not in SCORES:
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
    check_no_gradient(scores)


def check_no_gradient(scores: Tensor) -> None:
    """Kernels can't check this themselves: torch's stable ABI does not tell what requires a gradient."""
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
    if source.dtype not in TOKENS:
        raise TypeError(f"source must be int64 or int32, not {source.dtype}.")
    if source.device != tokens.device:
        raise ValueError(f"source is on {source.device} and tokens on {tokens.device}.")


def reference_ban_repeated_ngrams_(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_no_overlap(scores)
    if length >= ngram_size:
        _ban(tokens[:, :length], tokens[:, length + 1 - ngram_size : length], scores)


def reference_ban_source_ngrams_(
    source: Tensor, tokens: Tensor, scores: Tensor, ngram_size: int, length: int, beams: int
) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_source(source, tokens, beams)
    check_no_overlap(scores)
    if length >= ngram_size - 1 and source.shape[1] >= ngram_size:
        _ban(source.repeat_interleave(beams, dim=0), tokens[:, length + 1 - ngram_size : length], scores)


def _ban(text: Tensor, prefix: Tensor, scores: Tensor) -> None:
    """Ban each token that follows `prefix`, `[rows, n-1]`, anywhere in `text`, `[rows, N]`."""
    vocabulary = scores.shape[1]
    if not vocabulary:
        return
    windows = text.unfold(1, prefix.shape[1] + 1, 1)  # [rows, places, n]
    token = windows[..., -1].long()
    is_banned = (windows[..., :-1] == prefix[:, None]).all(-1) & (token >= 0) & (token < vocabulary)
    # Every place writes something, so that no shape depends on what is banned: the places that ban nothing repeat the
    # row's first ban. A row without any writes one of its scores where it is.
    first = is_banned.int().argmax(1, keepdim=True)
    anchor = token.gather(1, first).clamp(0, vocabulary - 1)
    value = torch.where(is_banned.gather(1, first), float("-inf"), scores.gather(1, anchor))
    scores.scatter_(1, torch.where(is_banned, token, anchor), value.expand_as(token))


def fake_ban_repeated_ngrams_(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    check_ngrams(tokens, scores, ngram_size, length)


def fake_ban_source_ngrams_(
    source: Tensor, tokens: Tensor, scores: Tensor, ngram_size: int, length: int, beams: int
) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_source(source, tokens, beams)


# The length is symbolic: it grows at every step, and a compiled step must not be compiled again each time.
_ban_repeated_ngrams = define(
    "ban_repeated_ngrams_",
    "(Tensor tokens, Tensor(a!) scores, int ngram_size, SymInt length) -> ()",
    reference_ban_repeated_ngrams_,
    fake_ban_repeated_ngrams_,
)
_ban_source_ngrams = define(
    "ban_source_ngrams_",
    "(Tensor source, Tensor tokens, Tensor(a!) scores, int ngram_size, SymInt length, int beams) -> ()",
    reference_ban_source_ngrams_,
    fake_ban_source_ngrams_,
)
