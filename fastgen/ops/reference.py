"""The operators in plain torch: the reference, and what runs where there is no native library.

Vectorised and without host synchronisation, so they can be captured and compiled as well; unlike the native one,
`topk_log_softmax` allocates temporaries of the size of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen import attention
from fastgen.ops.checks import (
    LONGEST,
    check_attention,
    check_fingerprint,
    check_ngrams,
    check_no_overlap,
    check_packed,
    check_probabilities,
    check_screened,
    check_skinny,
    check_source,
    check_topk,
)

_LOW_WORD = 2**32 - 1
_OF_ROWS = 2**32  # where the multipliers of rows begin
_SLAB = {"cpu": 2**16}  # words of a fingerprint at a time, which stay in a near cache; elsewhere:
_LARGE_SLAB = 2**22


def ban_repeated_ngrams_(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_no_overlap(scores)
    if length >= ngram_size:
        _ban(tokens[:, :length], tokens[:, length + 1 - ngram_size : length], scores)


def ban_source_ngrams_(
    source: Tensor, tokens: Tensor, scores: Tensor, ngram_size: int, length: int, beams: int
) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_source(source, tokens, beams)
    check_no_overlap(scores)
    if length >= ngram_size - 1 and source.shape[1] >= ngram_size:
        _ban(source.repeat_interleave(beams, dim=0), tokens[:, length + 1 - ngram_size : length], scores)


def _ban(text: Tensor, prefix: Tensor, scores: Tensor) -> None:
    """Ban what follows `prefix` `[rows, n-1]` wherever it occurs in `text` `[rows, N]`."""
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


def topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
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


def beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    check_attention(query, key, value, bias)
    folded = attention.fold_beams(query, *key.shape[:2])
    return attention.unfold_beams(attention.folded_attention(folded, key, value, bias, scale))


def skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    check_skinny(rows, weights, bias)
    output = torch.cat([F.linear(rows, weight.float()) for weight in weights], -1)
    return output if bias is None else output + bias


def screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> Tensor:
    check_screened(rows, weight, codes, scales, errors, bias)
    about = F.linear(rows, codes.float()) * scales
    about = about if bias is None else about + bias
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64) * 1.000001
    norms = torch.where(norms < LONGEST, norms, torch.inf).float()
    tiny = 4 * (rows.shape[-1] + 1) * torch.finfo(torch.float32).tiny
    reach = norms * errors + about.abs() * 2.4e-7 + tiny
    lower = (about - reach).nan_to_num(nan=-torch.inf, posinf=torch.inf)
    is_behind = about + reach < lower.amax(-1, keepdim=True)  # false where one is NaN
    return F.linear(rows, weight, bias).masked_fill(is_behind, -torch.inf)


def multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    check_probabilities(probabilities)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> Tensor:
    check_packed(rows, packed, width, bias)
    return F.linear(rows, packed.transpose(1, 2).flatten(0, 1)[:width], bias)


def fingerprint(tensor: Tensor) -> Tensor:
    check_fingerprint(tensor)
    total = tensor.new_zeros((), dtype=torch.int64)
    if not tensor.numel():
        return total
    count = -(-tensor.shape[1] * tensor.element_size() // 4)
    by = _multipliers(0, count, tensor.device)
    step = max(1, _SLAB.get(tensor.device.type, _LARGE_SLAB) // count)
    products = torch.empty(min(step, len(tensor)), count, dtype=torch.int64, device=tensor.device)
    sums = torch.empty(len(tensor), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(tensor), step):
        words = _words(tensor[start : start + step])
        torch.sum(torch.mul(words, by, out=products[: len(words)]), 1, out=sums[start : start + step])
    return (_mixed(sums) * _multipliers(_OF_ROWS, len(tensor), tensor.device)).sum()


def _words(rows: Tensor) -> Tensor:
    """The bytes of `rows`, `[count, size]`, as int32 `[count, words]`, each row's last word filled up with zeros."""
    rows = rows.detach()
    if rows.stride() != (rows.shape[1], 1):
        rows = rows.clone(memory_format=torch.contiguous_format)
    rows = rows.view(torch.uint8)
    if (more := -rows.shape[1] % 4) or rows.storage_offset() % 4:
        rows = F.pad(rows, (0, more)).clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


def _multipliers(first: int, count: int, device: torch.device) -> Tensor:
    """Those of `count` indices, int64 `[count]`: odd, and else SplitMix64 (Steele, Lea and Flood 2014) of the index."""
    z = torch.arange(first + 1, first + count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _mixed(sums: Tensor) -> Tensor:
    """One to one: what two rows' sums have in common in their low bits is gone."""
    sums = (sums ^ _shifted(sums, 32)) * _signed(0xD6E8FEB86659FD93)
    return sums ^ _shifted(sums, 32)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """int64, shifted right as if it had no sign."""
    return (numbers >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word
