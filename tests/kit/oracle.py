"""The operators by brute force, on Python lists, and the inputs they are tested with."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

# Of hypothesis; test_topk.py starts tests again in processes of other capabilities.
EXAMPLES = 150 if "FASTGEN_TEST_CAPABILITY" in os.environ else 400
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INFINITY = math.inf


def banned_by_ngrams(text: list[int], prefix: list[int]) -> set[int]:
    """What follows `prefix` anywhere in `text`."""
    n = len(prefix) + 1
    return {text[i + n - 1] for i in range(len(text) - n + 1) if text[i : i + n - 1] == prefix}


def banned(scores: Tensor, rows: list[set[int]]) -> Tensor:
    """`scores` with these tokens of each row at -inf, those outside the vocabulary left out."""
    result = scores.clone()
    for row, tokens in enumerate(rows):
        for token in tokens:
            if 0 <= token < scores.shape[1]:
                result[row, token] = -INFINITY
    return result


def ban_repeated(tokens: Tensor, scores: Tensor, n: int, length: int) -> Tensor:
    rows = [row[:length] for row in tokens.tolist()]
    # A row shorter than n - 1 has no prefix.
    return banned(scores, [banned_by_ngrams(row, row[length - n + 1 :]) if length >= n else set() for row in rows])


def ban_source(source: Tensor, tokens: Tensor, scores: Tensor, n: int, length: int, beams: int) -> Tensor:
    texts = source.tolist()
    rows = [row[:length] for row in tokens.tolist()]
    return banned(
        scores,
        [
            banned_by_ngrams(texts[i // beams], row[length - n + 1 :]) if length >= n - 1 else set()
            for i, row in enumerate(rows)
        ],
    )


def topk(row: list[float], k: int, without: set[int]) -> tuple[list[float], list[int], float]:
    """Log-probabilities, tokens and log-sum-exp of one row of logits, in float64."""
    if any(math.isnan(x) for x in row):
        log_sum_exp = math.nan
    else:
        top = max(row)
        log_sum_exp = top if math.isinf(top) else top + math.log(math.fsum(math.exp(x - top) for x in row))
    rank = [-INFINITY if math.isnan(x) or token in without else x for token, x in enumerate(row)]
    tokens = sorted(range(len(row)), key=lambda token: (-rank[token], token))[:k]
    return [rank[token] - log_sum_exp for token in tokens], tokens, log_sum_exp


def assert_topk(outputs: tuple[Tensor, ...], logits: Tensor, k: int, without: Tensor | None = None) -> None:
    """Tokens as the oracle's, log-probabilities and log-sum-exp within float32's rounding."""
    log_probs, tokens, log_sum_exp = outputs
    rows = logits.shape[0]
    assert log_probs.shape == tokens.shape == (rows, k) and log_sum_exp.shape == (rows,)
    assert (log_probs.dtype, tokens.dtype, log_sum_exp.dtype) == (torch.float32, torch.int64, torch.float32)
    assert all(output.is_contiguous() for output in outputs)
    for i, row in enumerate(logits.float().tolist()):
        bans = set() if without is None else set((without if without.dim() == 1 else without[i]).tolist())
        expected, expected_tokens, expected_sum = topk(row, k, bans)
        assert tokens[i].tolist() == expected_tokens
        close(log_sum_exp[i : i + 1], [expected_sum], expected_sum)
        close(log_probs[i], expected, expected_sum)


def close(actual: Tensor, expected: list[float], scale: float) -> None:
    """Equal within 8 ulps of float32 at the size of the log-sum-exp, on which log-probabilities depend."""
    other = torch.tensor(expected, dtype=torch.float64)
    tolerance = 1e-6 * max(1.0, abs(scale)) if math.isfinite(scale) else 0.0
    torch.testing.assert_close(actual.double(), other, rtol=1e-6, atol=tolerance, equal_nan=True)
