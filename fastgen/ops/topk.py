"""Finds the k best tokens of each row and their log-probabilities, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.checks import SCORES
from fastgen.ops.operator import define

_LOW_WORD = 2**32 - 1


def topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens of each row, their log-probabilities, and the row's log-sum-exp.

    Natively this is one pass over the logits without a temporary of that size, after the search of LightSeq (Wang
    et al. 2021, https://arxiv.org/abs/2010.13887, section 2.2): a lower bound of the k-th best logit from the maxima
    of disjoint groups, and a selection among the logits that reach it. The result is exact. On CUDA, k beyond 128 and
    more than 65,535 rows take `torch.topk` of whole rows instead, with temporaries several times the logits' size.

    Args:
        logits: float32, float16 or bfloat16 `[rows, V]`, V < 2^31. Rows may have any stride; if the tokens inside a
            row have one other than 1, they are copied.
        k: 1 to V.
        banned: int64 `[width]` (the same tokens in all rows) or `[rows, width]`: tokens that must not be chosen, in
            any order. Negative entries and those beyond V - 1 are ignored. Banned tokens count in the log-sum-exp.

    Returns:
        log_probs: float32 `[rows, k]`, `log_softmax` of the logits, best first.
        tokens: int64 `[rows, k]`. Equal logits are ordered by token, the lowest first. A banned token, and a NaN,
            rank as -inf and have that log-probability: such tokens come last, if fewer than k others are left.
        log_sum_exp: float32 `[rows]`, of all logits of the row. A NaN among them makes it NaN, and the row's
            log-probabilities with it; a row of -inf alone has -inf and NaN log-probabilities, as in `log_softmax`.

    Raises:
        ValueError: for shapes, devices or numbers other than these.
        TypeError: for other dtypes.
    """
    log_probs, tokens, log_sum_exp = _topk_log_softmax(logits, k, banned)
    return log_probs, tokens, log_sum_exp


def check_topk(logits: Tensor, k: int, banned: Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be [rows, vocabulary], not of shape {list(logits.shape)}.")
    if logits.dtype not in SCORES:
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


def reference_topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    check_topk(logits, k, banned)
    rows, vocabulary = logits.shape
    logits = logits.float()
    maximum = logits.amax(-1, keepdim=True)
    maximum = torch.where(maximum.isfinite(), maximum, 0.0)  # inf - inf would be NaN
    log_sum = (logits - maximum).exp().sum(-1, keepdim=True).log()  # [rows, 1]

    allowed = torch.where(logits.isnan(), float("-inf"), logits)
    if banned is not None:
        mask = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
        is_token = (banned >= 0) & (banned < vocabulary)
        mask.scatter_(1, torch.where(is_token, banned, vocabulary).expand(rows, -1), True)
        allowed = allowed.masked_fill(mask[:, :vocabulary], float("-inf"))
    # torch.topk leaves the order of equal values open, so let it rank integers that are all different: the
    # logit's bits, which sort like the logit once those of negative ones are inverted, then the token, lowest first.
    bits = (allowed + 0.0).view(torch.int32)  # -0.0 equals 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    from_the_end = vocabulary - 1 - torch.arange(vocabulary, device=logits.device)
    keys = torch.topk((bits << 32) | from_the_end, k).values
    tokens = vocabulary - 1 - (keys & _LOW_WORD)
    log_probs = (allowed.gather(1, tokens) - maximum) - log_sum
    return log_probs, tokens, (log_sum + maximum)[:, 0]


def fake_topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    check_topk(logits, k, banned)
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, k, dtype=torch.float32),
        logits.new_empty(rows, k, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
    )


_topk_log_softmax = define(
    "topk_log_softmax",
    "(Tensor logits, int k, Tensor? banned=None) -> (Tensor log_probs, Tensor tokens, Tensor log_sum_exp)",
    reference_topk_log_softmax,
    fake_topk_log_softmax,
)
