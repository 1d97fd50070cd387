"""Slim caches: of each position one vector is stored, from which keys and values of all heads follow.

Graef and Wasielewski, "Slim attention: cut your context memory in half without loss" (2025), over the beam tree. The
vector is the layer's input X (their section 6, option 2), which for cross-attention is the encoder's output, one for
all layers (section 7, option 2), or the keys K, or the values V. What is missing is never computed for each position:
its projection moves to the query, or behind the weighted sum.

`B` sentences, `M` beams, `H` query heads, `Hkv` key heads, `D` head size, `C` size of what is stored, `K` positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.attention import beam_attention


@dataclass(frozen=True)
class Projections:
    """What makes keys and values of a layer's input, head by head: views of the model's own weights."""

    key: Tensor  # [Hkv, D, C]
    value: Tensor  # [Hkv, Dv, C]
    key_bias: Tensor | None = None  # [Hkv, D]
    value_bias: Tensor | None = None  # [Hkv, Dv]

    def keys_and_values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of `inputs` `[B, K, C]`: `[B, Hkv, K, D]` and `[B, Hkv, K, Dv]`."""
        return _projected(inputs, self.key, self.key_bias), _projected(inputs, self.value, self.value_bias)


@dataclass(frozen=True)
class Choice:
    """Whose keys and values are not stored."""

    own: bool = False  # self-attention's: the input is, X
    source: bool = False  # cross-attention's: the encoder's output is, E


class Slim:
    """How one layer attends to what it stores, `[B, 1, K, C]`."""

    def __init__(self, projections: Projections) -> None:
        self.projections = projections

    def stored(self, inputs: Tensor) -> Tensor:
        """`inputs` of the layer, `[rows, P, C]`, as they are stored, `[rows, 1, P, C]`."""
        return inputs[:, None]

    def attend(self, query: Tensor, stored: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """`fastgen.attention.beam_attention` of keys and values that nobody computes.

        Head i's scores are `(q W_K,i) X^T`: of `q (X W_K,i^T + b_K,i)^T` the key's bias adds the same to all scores
        of a row, which the softmax does not see. Its output is `(P X) W_V,i^T + b_V,i`, as a row of P sums to 1. What
        is between is float32.

        Args:
            query: `[B*M, H, 1, D]`; bias and scale: see there.

        Returns: `[B*M, 1, H, Dv]`, of the query's dtype, contiguous.
        """
        rows = _by_key_head(query[:, :, 0], len(self.projections.key))  # [Hkv, B*M*G, D]
        absorbed = torch.bmm(rows.float(), self.projections.key.float())  # [Hkv, B*M*G, C]
        absorbed = _by_row(absorbed, len(query))[:, :, None]  # [B*M, H, 1, C]
        stored, bias = stored.float(), None if bias is None else bias.float()
        sums = beam_attention(absorbed, stored, stored, bias, scale)  # [B*M, 1, H, C]
        rows = _by_key_head(sums[:, 0], len(self.projections.value))  # [Hkv, B*M*G, C]
        values = torch.bmm(rows, self.projections.value.float().transpose(1, 2))  # [Hkv, B*M*G, Dv]
        if (value_bias := self.projections.value_bias) is not None:
            values += value_bias.float()[:, None]
        return _by_row(values, len(query))[:, None].to(query.dtype).contiguous()

    def keys_and_values(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Of all positions, for those who need them: `[B, Hkv, K, D]` and `[B, Hkv, K, Dv]`."""
        return self.projections.keys_and_values(stored[:, 0])


def attend(query: Tensor, stored: tuple[Tensor, ...], slim: Slim | None, bias: Tensor | None, scale: float) -> Tensor:
    """`beam_attention` to keys and values or, with a `slim` cache, to what is stored in their place."""
    if slim is None:
        keys, values = stored
        return beam_attention(query, keys, values, bias, scale)
    (latent,) = stored
    return slim.attend(query, latent, bias, scale)


def keys_and_values(stored: tuple[Tensor, ...], slim: Slim | None) -> tuple[Tensor, Tensor]:
    """Those that are stored, or that follow from what is."""
    if slim is None:
        keys, values = stored
        return keys, values
    (latent,) = stored
    return slim.keys_and_values(latent)


def kind_of(kinds: set[str]) -> str:
    """What a call's layers store, "x", "e" or "kv", in one word."""
    return "+".join(sorted(kinds, key=["x", "e", "kv"].index))


def _projected(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[B, K, C]` -> `[B, Hkv, K, D]`."""
    heads, size, width = weight.shape
    bias = None if bias is None else bias.reshape(-1)
    return F.linear(inputs, weight.reshape(-1, width), bias).unflatten(2, (heads, size)).transpose(1, 2)


def _by_key_head(rows: Tensor, key_heads: int) -> Tensor:
    """`[R, H, D]` -> `[Hkv, R*G, D]`, the query heads of a key head in a row."""
    return rows.unflatten(1, (key_heads, -1)).transpose(0, 1).flatten(1, 2)


def _by_row(heads: Tensor, rows: int) -> Tensor:
    """`[Hkv, R*G, D]` -> `[R, H, D]`."""
    return heads.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)
