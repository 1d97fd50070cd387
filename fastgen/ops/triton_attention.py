"""Beam attention on CUDA devices, in Triton: a few query rows over long shared keys, with the keys split among blocks.

torch's own attention takes a block for each head of each sentence, which leaves most of a GPU idle where those are few.
After flash-decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): each block takes a part of the keys,
and a second kernel joins the parts by their maxima and sums (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867).

Importing this needs Triton, which torch's wheels for CUDA bring along.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgen import phases

__phase__ = phases.ATTENTION

MOST_ROWS = 64  # query rows that share a key: beams times query heads per key head
_MOST_SIZE = 256
_KEYS = 64  # keys that a block reads in one step
_MOST_SPLITS = 64


@triton.jit
def next_weights(scores, highest):
    """From scores `[rows, keys]` and each row's maximum so far: the new maximum, the weights relative to it, and the
    factor that rescales earlier sums."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf would be NaN
    return higher, tl.exp(scores - shift[:, None]), tl.exp(highest - shift)


@triton.jit
def _attend(
    query,
    key,
    value,
    bias,
    output,
    maxima,
    sums,
    scale,
    keys,
    beams,
    group,
    key_heads,
    query_row,
    query_head,
    key_batch,
    key_head,
    key_slot,
    value_batch,
    value_head,
    value_slot,
    bias_batch,
    bias_head,
    bias_beam,
    bias_slot,
    per_split,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend to one part of a key head's keys: output `[B*M, 1, H, Dv]`, or by part `[B*Hkv, parts, ROWS, Dv]`."""
    place, part = tl.program_id(0), tl.program_id(1)
    sentence, head = (place // key_heads).to(tl.int64), (place % key_heads).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = row < beams * group
    beam, query_heads = row % beams, head * group + row // beams
    size, value_size = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)

    at = (sentence * beams + beam) * query_row + query_heads * query_head
    q = tl.load(query + at[:, None] + size[None, :], mask=is_row[:, None] & (size < SIZE)[None, :], other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    begin = part * per_split
    end = tl.minimum(begin + per_split, keys)
    for start in range(begin, end, KEYS):
        slot = start + tl.arange(0, KEYS)
        is_slot = slot < end
        far = slot.to(tl.int64)
        k = tl.load(
            key + sentence * key_batch + head * key_head + far[:, None] * key_slot + size[None, :],
            mask=is_slot[:, None] & (size < SIZE)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_BIAS:
            of_row = sentence * bias_batch + query_heads * bias_head + beam * bias_beam
            added = tl.load(
                bias + of_row[:, None] + far[None, :] * bias_slot, mask=is_row[:, None] & is_slot[None, :], other=0.0
            )
            scores += added.to(tl.float32)
        scores = tl.where(is_slot[None, :], scores, float("-inf"))
        highest, weights, rescale = next_weights(scores, highest)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(
            value + sentence * value_batch + head * value_head + far[:, None] * value_slot + value_size[None, :],
            mask=is_slot[:, None] & (value_size < VALUE_SIZE)[None, :],
            other=0.0,
        )
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    is_value = (value_size < VALUE_SIZE)[None, :]
    if IS_SPLIT:
        at = (place.to(tl.int64) * tl.num_programs(1) + part) * ROWS + row
        tl.store(maxima + at, highest)
        tl.store(sums + at, total)
        tl.store(output + at[:, None] * VALUE_SIZE + value_size[None, :], mixed, mask=is_value)
    else:
        at = (sentence * beams + beam) * (key_heads * group) + query_heads
        result = (mixed / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + at[:, None] * VALUE_SIZE + value_size[None, :], result, mask=is_row[:, None] & is_value)


@triton.jit
def _join(
    parts,
    maxima,
    sums,
    output,
    beams,
    group,
    key_heads,
    splits,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    """Join the parts of one query row, `[B*Hkv, parts, ROWS, Dv]`, in the output `[B*M, 1, H, Dv]`."""
    place, row = tl.program_id(0), tl.program_id(1)
    value_size = tl.arange(0, VALUE_PADDED)
    is_value = value_size < VALUE_SIZE
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([VALUE_PADDED], tl.float32)
    for part in range(splits):
        at = (place.to(tl.int64) * splits + part) * ROWS + row
        its = tl.load(maxima + at)
        higher = tl.maximum(highest, its)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        rescale, weight = tl.exp(highest - shift), tl.exp(its - shift)
        total = total * rescale + tl.load(sums + at) * weight
        v = tl.load(parts + at * VALUE_SIZE + value_size, mask=is_value, other=0.0)
        mixed = mixed * rescale + v * weight
        highest = higher
    sentence, head = (place // key_heads).to(tl.int64), place % key_heads
    at = (sentence * beams + row % beams) * (key_heads * group) + head * group + row // beams
    tl.store(output + at * VALUE_SIZE + value_size, (mixed / total).to(output.dtype.element_ty), mask=is_value)


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether this kernel cannot compute `beam_attention` of these tensors."""
    rows = query.shape[0] // key.shape[0] * (query.shape[1] // key.shape[1])
    return (
        rows > MOST_ROWS
        or max(key.shape[3], value.shape[3]) > _MOST_SIZE
        or min(key.shape[2:] + value.shape[3:]) == 0
        or key.shape[2] >= 2**31
        or query.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    )


def beam_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, splits: int | None = None
) -> Tensor:
    """Softmax attention of a few query rows, the beams of a sentence, to keys and values that they share.

    Args:
        query: float32, float16 or bfloat16 `[B*M, H, 1, D]`.
        key: `[B, Hkv, K, D]`, H a multiple of Hkv; value: `[B, Hkv, K, Dv]`. Of the same dtype.
        bias: of a float dtype, broadcastable to `[B, H, M, K]`, is added to the scores; or None.
        scale: factor of the scores.
        splits: parts that the keys are read in, side by side; by default as many as fill the device.

    Returns: `[B*M, 1, H, Dv]`, contiguous; NaN for a row whose scores are all -inf. Scores, maxima and sums are
        float32.
    """
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    if splits is None:
        splits = splits_for(query.device, key.shape[0] * key.shape[1], key.shape[2])
    with torch.cuda.device(query.device if query.device.type == "cuda" else -1):  # Triton launches on the current one
        return _launched(query, key, value, bias, scale, splits)


def _launched(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, splits: int) -> Tensor:
    batch, key_heads, keys, size = key.shape
    rows, heads = query.shape[:2]
    beams, group, value_size = rows // batch, heads // key_heads, value.shape[3]
    tile = max(16, triton.next_power_of_2(beams * group))
    per_split = triton.cdiv(triton.cdiv(keys, splits), _KEYS) * _KEYS
    splits = triton.cdiv(keys, per_split)
    output = torch.empty(rows, 1, heads, value_size, dtype=query.dtype, device=query.device)
    maxima, sums, into = output, output, output
    if splits > 1:
        like: Any = dict(dtype=torch.float32, device=query.device)
        maxima, sums = torch.empty(2, batch * key_heads, splits, tile, **like)
        into = torch.empty(batch * key_heads, splits, tile, value_size, **like)
    strides: Any = (0, 0, 0, 0)
    if bias is not None:
        strides = bias.expand(batch, heads, beams, keys).stride()
    padded, value_padded = (max(16, triton.next_power_of_2(n)) for n in (size, value_size))
    _attend[(batch * key_heads, splits)](
        query,
        key,
        value,
        query if bias is None else bias,
        into,
        maxima,
        sums,
        scale,
        keys,
        beams,
        group,
        key_heads,
        query.stride(0),
        query.stride(1),
        *key.stride()[:3],
        *value.stride()[:3],
        *strides,
        per_split,
        SIZE=size,
        VALUE_SIZE=value_size,
        ROWS=tile,
        KEYS=_KEYS,
        PADDED=padded,
        VALUE_PADDED=value_padded,
        HAS_BIAS=bias is not None,
        IS_SPLIT=splits > 1,
    )
    if splits > 1:
        join(into, maxima, sums, output, key_heads)
    return output


def join(parts: Tensor, maxima: Tensor, sums: Tensor, output: Tensor, key_heads: int) -> None:
    """Join `parts`, `[B*Hkv, splits, rows, Dv]`, in `output`, `[B*M, 1, H, Dv]`; maxima, sums: `[B*Hkv, splits, rows]`.

    There are M * H / Hkv rows or more.
    """
    places, splits, rows, value_size = parts.shape
    beams, group = output.shape[0] * key_heads // places, output.shape[2] // key_heads
    _join[(places, beams * group)](
        parts,
        maxima,
        sums,
        output,
        beams,
        group,
        key_heads,
        splits,
        VALUE_SIZE=value_size,
        ROWS=rows,
        VALUE_PADDED=triton.next_power_of_2(value_size),
    )


def splits_for(device: torch.device, blocks: int, keys: int) -> int:
    """The number of parts that gives each of the device's processors two blocks, of two steps' keys at least."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, 2 * processors // blocks)
    return int(min(wanted, max(1, keys // (2 * _KEYS)), _MOST_SPLITS))
