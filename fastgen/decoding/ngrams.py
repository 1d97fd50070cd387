"""Bans of n-grams that a hypothesis already has, for a whole batch at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ban_repeated_ngrams(scores: Tensor, tokens: Tensor, size: int, never: int) -> Tensor:
    """Set to -inf, in place, every token that would complete an n-gram for the second time.

    Args:
        scores: float `[rows, V]`.
        tokens: the hypotheses so far, int64 `[rows, length]`. The first token is the one that starts every
            hypothesis: it may begin an n-gram, but it is never what is banned.
        size: n, at least 1.
        never: a token whose score is -inf already; it takes the writes that ban nothing, so that
            neither shapes nor control flow depend on what is found.

    Returns: `scores`.
    """
    if size < 1:
        raise ValueError(f"an n-gram has at least 1 token, not {size}")
    if tokens.shape[1] < max(size, 2):
        return scores
    if size == 1:
        return scores.scatter_(1, tokens[:, 1:], -math.inf)
    ngrams = tokens.unfold(1, size, 1)  # [rows, length - n + 1, n]
    last = tokens[:, tokens.shape[1] - size + 1 :]  # the n - 1 tokens that the next one would follow
    repeated = (ngrams[:, :, :-1] == last[:, None]).all(-1)
    return scores.scatter_(1, torch.where(repeated, ngrams[:, :, -1], never), -math.inf)
