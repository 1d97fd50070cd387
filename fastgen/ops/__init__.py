"""Operators of the decode loop, for anybody to call: n-gram bans in place, exact top-k of the log-softmax, samples,
attention of all beams of a sentence to its keys, and products with large weights.

They work on every device in plain torch, and natively where a library could be found or built (`fastgen.ops.native`;
`fastgen.status()` says which). They can be traced by `torch.compile(fullgraph=True)` and captured in CUDA graphs, and
are also `torch.ops.fastgen.*`. Importing this module loads the library, and compiles it the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.ops import _schemas, native
from fastgen.ops.checks import LONGEST, PANEL

__all__ = [
    "ban_repeated_ngrams_",
    "ban_source_ngrams_",
    "beam_attention",
    "fingerprint",
    "is_native",
    "multinomial",
    "pack_weight",
    "packed_linear",
    "screen_weight",
    "screened_linear",
    "skinny_linear",
    "topk_log_softmax",
]


_SCREENED_ROWS = 1024


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
    torch.ops.fastgen.ban_repeated_ngrams_(tokens, scores, ngram_size, tokens.shape[-1] if length is None else length)


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
    length = tokens.shape[-1] if length is None else length
    torch.ops.fastgen.ban_source_ngrams_(source, tokens, scores, ngram_size, length, beams)


def topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens of each row, their log-probabilities, and the row's log-sum-exp.

    Natively one pass over the logits and no temporary of their size, after the hierarchical search of LightSeq (Wang
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
    log_probs, tokens, log_sum_exp = torch.ops.fastgen.topk_log_softmax(logits, k, banned)
    return log_probs, tokens, log_sum_exp


def beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of a few query rows, the beams of a sentence, to keys and values that they share.

    Equations 3 and 4 of FastSeq (Yan et al. 2021, https://arxiv.org/abs/2106.04718). Natively, on the CPU, each key and
    value is read once for all rows that share it, block by block with a running maximum (Milakov and Gimelshein 2018,
    https://arxiv.org/abs/1805.02867).

    Args:
        query: float32 `[B*M, H, 1, D]`, M beams of each of B sentences.
        key: float32 `[B, Hkv, K, D]`, H a multiple of Hkv; value: float32 `[B, Hkv, K, Dv]`. The numbers of a key are
            to lie side by side, or all are copied; so for queries and values.
        bias: float32, broadcastable to `[B, H, M, K]`, is added to the scores; or None.
        scale: factor of the scores.

    Returns: float32 `[B*M, 1, H, Dv]`, contiguous. A row with a NaN among its scores is NaN, as in a softmax, and so is
        one of -inf alone; only plain torch, from 800 keys on, has zeros there, as its own attention does.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = torch.ops.fastgen.beam_attention(query, key, value, bias, scale)
    return output


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on each element of a tensor, bit for bit, and on its place: to tell whether it was edited.

    Multilinear hashing (Carter and Wegman 1979, https://doi.org/10.1016/0022-0000(79)90044-8; modulo a power of two:
    Lemire and Kaser 2014, https://doi.org/10.1093/comjnl/bxt070) of the 32-bit words of each row, and then of the rows.
    Natively, on the CPU, the tensor is read once, from where it is, about as fast as it comes from memory.

    An edit within one word, so within one element of 32 bits or fewer, changes it for certain. Over the choice of the
    multipliers, any other edit of a row leaves it as it is with a probability of at most 2^-(63 - t), where the lowest
    bit that changes in any of the words is number t: 2^-32 where signs flip and nothing else, 2^-63 of most edits of
    float32 numbers; and so does one of several rows, with 2^-57 or so. The multipliers are always the same: this is no
    protection from somebody who looks for edits that go unseen.

    Args:
        tensor: `[rows, size]`, of any dtype and strides.

    Returns: int64 `[]`; 0 of an empty tensor. The same whatever the strides, the device and the number of threads. No
        gradient passes through it.

    Raises:
        ValueError: for other shapes.
    """
    found: Tensor = torch.ops.fastgen.fingerprint(tensor.detach())
    return found


def skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """The products of a few rows with weights that share them, as the projections of an attention do.

    A decode step of a few sentences is as fast as its weights come from memory (roofline: Williams et al. 2009,
    https://doi.org/10.1145/1498765.1498785). Natively, on the CPU, weights are read once, from where they are, so
    nothing is copied or packed. Up to 12 rows or so: with more, the arithmetic takes longer than reading, and
    libraries that pack do it better.

    Args:
        rows: float32 `[..., size]`.
        weights: float32 or float16 `[width_i, size]` each; float16 ones are read as the float32 numbers that they are.
        bias: float32 `[width]`, or None; `width` is the sum of the weights' widths.

    Returns: float32 `[..., width]`: `linear(rows, torch.cat(weights), bias)`; no gradient passes through it. Natively,
        each row is the same to the last digit whatever the others are, and however many.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = torch.ops.fastgen.skinny_linear(rows, weights, bias)
    return output


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of a weight for `packed_linear`, in panels of 64 outputs.

    Args: weight: float32 `[width, size]`, of any strides.

    Returns: float32 `[ceil(width / 64), size, 64]`, zeros beyond the last output.
    """
    weight = weight.detach()
    width, size = weight.shape
    whole = width // PANEL
    packed = weight.new_zeros(-(-width // PANEL), size, PANEL)
    packed[:whole] = weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if width % PANEL:
        packed[-1, :, : width % PANEL] = weight[whole * PANEL :].t()
    return packed


def packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None = None) -> Tensor:
    """`linear(rows, weight, bias)` of a weight packed by `pack_weight`.

    Natively, on the CPU, what one step of the loops needs lies side by side and in its order, as in the inner kernel of
    Goto and van de Geijn 2008 (https://doi.org/10.1145/1356052.1356053, section 5), so that some rows are as fast as
    the memory or the processor; libraries reach that with many rows only. Plain torch unpacks the weight at each call.

    Args:
        rows: float32 `[..., size]`.
        packed: float32 `[ceil(width / 64), size, 64]`.
        width: of the weight, outputs.
        bias: float32 `[width]`, or None.

    Returns: float32 `[..., width]`; no gradient passes through it. Natively, each row is the same to the last digit
        whatever the others are, and however many.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = torch.ops.fastgen.packed_linear(rows, packed, width, bias)
    return output


def multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token of each row, drawn by its probability: `torch.multinomial(probabilities, 1)[:, 0]`, faster.

    On the CPU torch makes a number of the exponential distribution for every token, one after the other. Here tokens
    of probability 0 get none, and the generator goes on as if they had: what is drawn, now and later, is torch's,
    whose builds all draw so as far as is known: compare both once to be sure.

    Args:
        probabilities: float32 `[rows, V]`, 0 or more; they need not add up to 1.
        generator: of the same device; torch's default one otherwise.

    Returns: int64 `[rows]`.

    Raises:
        ValueError: for shapes other than these.
        TypeError: for other dtypes.
        RuntimeError: for what is no probability, and rows without any, as torch says it.
    """
    tokens: Tensor = torch.ops.fastgen.multinomial(probabilities, generator)
    return tokens


def screen_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `screened_linear` reads of a weight in its place: a quarter of the bytes.

    Args: weight: float32 `[width, size]`, finite.

    Returns:
        codes: int8 `[width, size]`; `scales`: float32 `[width]`: `weight` is about `codes * scales[:, None]`.
        errors: float32 `[width]`: what is left of each row has this length at most, what rounding adds to a product
            included. A product with a row of length n is no further than n times this from that of the codes (Cauchy
            and Schwarz).
    """
    weight = weight.detach()
    width, size = weight.shape
    tiny = torch.finfo(torch.float32).tiny
    codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales, errors = weight.new_full((width,), tiny), weight.new_empty(width)
    # A sum of n products is off by n * 2^-24 of the product of the lengths at most (Higham 2002, equation 3.5), here
    # twice: once with the codes, once with the weight.
    rounding = (2 * size + 8) * 2.0**-24
    for start in range(0, width, _SCREENED_ROWS):  # temporaries stay small
        part = slice(start, start + _SCREENED_ROWS)
        if size:
            scales[part] = (weight[part].abs().amax(1) / 127).clamp_min(tiny)
        rounded = (weight[part] / scales[part, None]).round_()
        codes[part] = rounded
        # In double precision, whose squares don't overflow.
        left = torch.linalg.vector_norm(weight[part] - rounded * scales[part, None], dim=1, dtype=torch.float64)
        length = torch.linalg.vector_norm(weight[part], dim=1, dtype=torch.float64)
        bound = left * 1.00001 + (length + left) * rounding + tiny
        errors[part] = torch.where(length < LONGEST, bound, torch.inf)
    return codes, scales, errors


def screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`linear(rows, weight, bias)` of which only the largest output of each row is wanted: for greedy search.

    Products with the codes, within their errors, tell which outputs may be the largest; these few are computed with
    the weight itself. Natively, on the CPU, that is a quarter of the reading, and with few rows reading is the time.
    An exact form of screening for maximum inner products (bounds by lengths as in LEMP, Teflioudi et al. 2015,
    https://doi.org/10.1145/2723372.2747647).

    Args:
        rows: float32 `[..., size]`.
        weight: float32 `[width, size]`.
        codes, scales, errors: `screen_weight(weight)`.
        bias: float32 `[width]`, or None.

    Returns: float32 `[..., width]`: the outputs that may be the largest of their row, the largest always among them,
        and -inf for all others. Natively, they are those of `skinny_linear` to the last digit. All are computed of a
        row with a NaN or an infinity.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = torch.ops.fastgen.screened_linear(rows, weight, codes, scales, errors, bias)
    return output


def is_native(device: torch.device) -> bool:
    """Whether the operators run natively on `device`, and not in plain torch."""
    return native.is_loaded(device.type)


native.load(tuple(_schemas.SCHEMAS))
