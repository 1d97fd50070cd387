"""Beam attention: the beams of a sentence are query rows over one set of keys.

`B` sentences, `M` beams, `H` query heads, `G = H / Hkv` query heads per key head, `K` keys, `D` head size.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import phases
from fastgen.ops import native_operator
from fastgen.ops.attention import fold_beams, folded_attention, unfold_beams

__phase__ = phases.ATTENTION


def as_beams(query: Tensor) -> Tensor:
    """Treat a sentence's queries at several positions as beams: `[B, H, P, D]` -> `[B*P, H, 1, D]`."""
    return query.transpose(1, 2).flatten(0, 1)[:, :, None]


def beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of all beams over their sentence's shared keys.

    FastSeq's equations 3 and 4 (Yan et al., 2021), with the group axis of grouped-query attention beside
    the beams and an ancestry mask in `bias`. In float32 on the CPU one native operator, where there is one; on CUDA
    a Triton kernel where that is faster than torch's.

    Args:
        query: `[B*M, H, 1, D]`.
        key: `[B, Hkv, K, D]`; value: `[B, Hkv, K, Dv]`, same dtype as the query.
        bias: added to the scores before the softmax, same dtype, broadcastable to `[B, H, M, K]`.
        scale: factor of the scores.

    Returns: `[B*M, 1, H, Dv]`, contiguous.
    """
    is_cpu = query.device.type == "cpu"
    if is_cpu and is_plain(query) and query.dtype == torch.float32 and (native := _native()) is not None:
        output: Tensor = native(query, key, value, bias, scale)
        return output
    if may_take_triton(query):
        from fastgen.layers.attention_kernels import kernel_for  # brings Triton with it

        if (ours := kernel_for(query, key, value, bias, scale, _plain)) is not None:
            return ours(query, key, value, bias, scale)
    return _plain(query, key, value, bias, scale)


def may_take_triton(query: Tensor, *others: Tensor) -> bool:
    """Whether a kernel of `fastgen.layers.attention_kernels` may be used for these tensors."""
    return query.device.type == "cuda" and is_plain(query, *others) and not torch.compiler.is_dynamo_compiling()


def is_plain(query: Tensor, *others: Tensor) -> bool:
    """Whether neither autograd nor autocast is at work: they do not know our operators."""
    return not any(x.requires_grad for x in (query, *others)) and not torch.is_autocast_enabled(query.device.type)


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return unfold_beams(folded_attention(fold_beams(query, *key.shape[:2]), key, value, bias, scale))


_native = functools.partial(native_operator, "beam_attention")


def stream_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    bias: Tensor,
    own_bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Softmax attention of several streams of each beam, over the sentence's shared keys and one own key per stream.

    ProphetNet's n-gram attention (Qi et al. 2020, https://arxiv.org/abs/2001.04063, section 3.2) over the beam tree,
    and UniLM's attention of `[MASK]` behind the last token: the main stream, which comes first, sees the shared keys
    alone, which contain the main stream's own key. The softmax is in float32 at least.

    Args:
        query: of `S` streams, `[B*M, H, S, D]`.
        key: `[B, H, K, D]`; value: `[B, H, K, Dv]`, both of the query's dtype.
        own_key: of all streams but the main one, `[B*M, H, S-1, D]`; own_value: `[B*M, H, S-1, Dv]`.
        bias: added to the scores of the shared keys, broadcastable to `[B, H, M, S, K]`; own_bias: to those of the
            others, `[B*M, H, S-1]`, or None.
        scale: factor of the scores, not of the biases.

    Returns: `[B*M, S, H, Dv]`, contiguous.
    """
    (batch, heads, keys, size), streams = key.shape, query.shape[2]
    folded = query.unflatten(0, (batch, -1)).transpose(1, 2)  # [B, H, M, S, D]
    beams = folded.shape[2]
    scores = torch.bmm(folded.reshape(batch * heads, -1, size) * scale, key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, beams, streams, keys) + bias
    own = (query[:, :, 1:] * own_key).sum(3) * scale
    own = own if own_bias is None else own + own_bias
    own = F.pad(own, (1, 0), value=-torch.inf).unflatten(0, (batch, -1)).transpose(1, 2)  # [B, H, M, S]
    weights = (
        torch.cat([scores, own[..., None]], dim=4)
        .softmax(4, dtype=torch.promote_types(query.dtype, torch.float32))
        .to(query.dtype)
    )
    output = torch.bmm(weights[..., :-1].reshape(batch * heads, -1, keys), value.flatten(0, 1))
    output = output.view(batch, heads, beams, streams, -1).permute(0, 2, 3, 1, 4)  # [B, M, S, H, Dv]
    share = weights[..., 1:, -1].permute(0, 2, 3, 1)  # [B, M, S-1, H]
    theirs = own_value.unflatten(0, (batch, -1)).transpose(2, 3)  # [B, M, S-1, H, Dv]
    output = torch.cat([output[:, :, :1], output[:, :, 1:] + share[..., None] * theirs], dim=2)
    return output.flatten(0, 1)
