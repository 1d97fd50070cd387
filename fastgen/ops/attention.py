"""Attention of the beams of a sentence to keys and values that they share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import phases
from fastgen.ops.checks import check_floats
from fastgen.ops.operator import define

__phase__ = phases.ATTENTION

# On the CPU torch's fused attention works in blocks of many query rows; with a handful of rows, two
# batched products win until the keys no longer fit the cache. benchmarks/bench_attention.py measures it.
_FUSED_FROM_KEYS = 800
_NOTHING = torch.empty(1, dtype=torch.float32, device="cpu")  # what `baddbmm` adds to the products, 0 times


def beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of a few query rows, the beams of a sentence, to keys and values that they share.

    Equations 3 and 4 of FastSeq (Yan et al. 2021, https://arxiv.org/abs/2106.04718). Natively, on the CPU, each key and
    value is read once for all rows that share it, block by block with a running maximum (Milakov and Gimelshein 2018,
    https://arxiv.org/abs/1805.02867).

    Args:
        query: float32 `[B*M, H, 1, D]`, M beams of each of B sentences.
        key: float32 `[B, Hkv, K, D]`, H a multiple of Hkv; value: float32 `[B, Hkv, K, Dv]`. Queries, keys or values
            are copied unless the last stride is 1.
        bias: float32, broadcastable to `[B, H, M, K]`, is added to the scores; or None.
        scale: factor of the scores.

    Returns: float32 `[B*M, 1, H, Dv]`, contiguous. A row with a NaN among the scores is NaN, as in a softmax, and so is
        a row of -inf alone; only plain torch, from 800 keys on, has zeros there, as torch's own attention does.

    Raises:
        ValueError: for shapes or devices other than these.
        TypeError: for other dtypes.
    """
    output: Tensor = _beam_attention(query, key, value, bias, scale)
    return output


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
    check_fits_scores(bias, (batch, heads, rows // batch, keys))
    check_floats("query is", query, ("query", query), ("key", key), ("value", value), ("bias", bias))


def check_fits_scores(bias: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    if bias is not None and (
        bias.dim() != 4 or any(have not in (1, want) for have, want in zip(bias.shape, shape, strict=True))
    ):
        raise ValueError(f"bias must be broadcastable to {list(shape)}, not of shape {list(bias.shape)}.")


def reference_beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    check_attention(query, key, value, bias)
    return unfold_beams(folded_attention(fold_beams(query, *key.shape[:2]), key, value, bias, scale))


def fold_beams(query: Tensor, batch: int, key_heads: int) -> Tensor:
    """Query rows `[B*M, H, 1, D]` -> `[B, Hkv, G, M, D]`, next to keys `[B, Hkv, K, D]`."""
    rows, heads, _, size = query.shape
    folded = query.reshape(batch, rows // batch, key_heads, heads // key_heads, size)
    return folded.permute(0, 2, 3, 1, 4)


def unfold_beams(output: Tensor) -> Tensor:
    """`[B, Hkv, G, M, D]` -> `[B*M, 1, H, D]`, the shape that hosts expect from an attention function."""
    batch, key_heads, group, beams, size = output.shape
    # Contiguous even where reshape would make a view: some models take a `view` of it.
    return output.permute(0, 3, 1, 2, 4).reshape(batch * beams, 1, key_heads * group, size).contiguous()


def folded_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`beam_attention` in plain torch, for a query `[B, Hkv, G, M, D]`; returns `[B, Hkv, G, M, Dv]`."""
    batch, key_heads, group, beams, size = query.shape
    if query.device.type != "cpu" or query.dtype != torch.float32 or key.shape[2] >= _FUSED_FROM_KEYS:
        if bias is not None and group > 1:
            bias = _per_group(bias, key_heads, group).expand(-1, -1, group, beams, -1).flatten(2, 3)
        query = query.reshape(batch, key_heads, group * beams, size)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:
        keys = key.flatten(0, 1)  # a view: slots beyond those in use only change the stride of B*Hkv
        rows = query.reshape(batch * key_heads, group * beams, size)
        scores = torch.baddbmm(_NOTHING, rows, keys.transpose(1, 2), beta=0, alpha=scale)
        if bias is not None:
            scores.view(batch, key_heads, group, beams, key.shape[2]).add_(_per_group(bias, key_heads, group))
        output = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    return output.view(batch, key_heads, group, beams, value.shape[-1])


def _per_group(bias: Tensor, key_heads: int, group: int) -> Tensor:
    """`[B, 1 or H, M, K]` -> `[B, 1 or Hkv, 1 or G, M, K]`."""
    return bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (key_heads, group))


def fake_beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    check_attention(query, key, value, bias)
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


_beam_attention = define(
    "beam_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, float scale) -> Tensor",
    reference_beam_attention,
    fake_beam_attention,
)
