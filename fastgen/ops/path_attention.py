"""Attention of many beams: each sees the keys of the prompt, which all share, and those on its own path."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen import phases
from fastgen.ops.attention import check_attention, check_fits_scores
from fastgen.ops.checks import check_floats
from fastgen.ops.operator import define

__phase__ = phases.ATTENTION


def path_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Tensor, bias: Tensor | None, scale: float, shared: int
) -> Tensor:
    """Softmax attention of beams to the first slots, which they share, and to those on their own paths.

    `beam_attention` scores all slots for each beam, those of other beams too, and hides them afterwards: with M beams
    and T steps M (P + M T) scores. Here they are M (P + T). Natively, on the CPU, the shared keys are read block by
    block for many rows at once, and then each row's own, under one running maximum (Milakov and Gimelshein 2018,
    https://arxiv.org/abs/1805.02867).

    Args:
        query: float32 `[B*M, H, 1, D]`, M beams of each of B sentences.
        key: float32 `[B, Hkv, S, D]`, H a multiple of Hkv; value: float32 `[B, Hkv, S, Dv]`. Queries, keys or values
            are copied unless the last stride is 1.
        paths: int32 `[B*M, T]`: slots, in any order. A negative one ends a path.
        bias: float32, broadcastable to `[B, H, M, P + T]`, is added to the scores, first of the shared slots, then of
            the path's; or None.
        scale: factor of the scores.
        shared: P, the number of slots, from the first on, that all beams of a sentence see.

    Returns: float32 `[B*M, 1, H, Dv]`, contiguous. A row that sees no slot is NaN.

    Raises:
        ValueError: for shapes, devices or numbers other than these.
        TypeError: for other dtypes.
        IndexError: for slots beyond S - 1 on a path.
    """
    output: Tensor = _path_attention(query, key, value, paths, bias, scale, shared)
    return output


def check_path_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Tensor, bias: Tensor | None, shared: int
) -> None:
    check_attention(query, key, value, None)
    (rows, heads), (batch, _, slots, _) = query.shape[:2], key.shape
    if shared < 0 or shared > slots:
        raise ValueError(f"shared must be 0 to {slots}, not {shared}.")
    if paths.dim() != 2 or paths.shape[0] != rows:
        raise ValueError(f"paths must be [{rows}, depth], not of shape {list(paths.shape)}.")
    if paths.dtype != torch.int32:
        raise TypeError(f"paths must be int32, not {paths.dtype}.")
    if paths.device != query.device:
        raise ValueError(f"query is on {query.device} and paths on {paths.device}.")
    check_fits_scores(bias, (batch, heads, rows // batch, shared + paths.shape[1]))
    check_floats("query is", query, ("bias", bias))


def reference_path_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Tensor, bias: Tensor | None, scale: float, shared: int
) -> Tensor:
    check_path_attention(query, key, value, paths, bias, shared)
    if shared + paths.shape[1] == 0:  # no row sees a slot
        return fake_path_attention(query, key, value, paths, bias, scale, shared).fill_(torch.nan)
    (rows, heads), (batch, key_heads) = query.shape[:2], key.shape[:2]
    beams, group = rows // batch, heads // key_heads
    prompt = torch.arange(shared, device=paths.device).expand(rows, -1)
    is_seen = torch.cat([prompt >= 0, (paths >= 0).cumprod(1) > 0], dim=1)
    slots = torch.cat([prompt, paths.clamp(min=0)], dim=1)  # int64 [B*M, P + T]
    sentences = torch.arange(batch, device=paths.device).repeat_interleave(beams)[:, None]
    keys, values = key[sentences, :, slots], value[sentences, :, slots]  # [B*M, P + T, Hkv, D]
    queries = query[:, :, 0].unflatten(1, (key_heads, group))
    scores = torch.einsum("rhgd,rshd->rhgs", queries, keys).flatten(1, 2) * scale  # [B*M, H, P + T]
    if bias is not None:
        scores = (scores.unflatten(0, (batch, beams)) + bias.transpose(1, 2)).flatten(0, 1)
    scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
    weights = scores.softmax(-1).unflatten(1, (key_heads, group))
    return torch.einsum("rhgs,rshd->rhgd", weights, values).flatten(1, 2)[:, None].contiguous()


def fake_path_attention(
    query: Tensor, key: Tensor, value: Tensor, paths: Tensor, bias: Tensor | None, scale: float, shared: int
) -> Tensor:
    check_path_attention(query, key, value, paths, bias, shared)
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


_path_attention = define(
    "path_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor paths, Tensor? bias, float scale, int shared) -> Tensor",
    reference_path_attention,
    fake_path_attention,
)
