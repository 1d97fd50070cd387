"""Slim caches: one vector is stored for each position, and keys and values of all heads are computed from it.

Graef and Wasielewski, "Slim attention: cut your context memory in half without loss" (2025), over the beam tree. The
vector is the layer's input X (their section 6, option 2), which in cross-attention is the encoder output E, one for all
layers (section 7, option 2); or the keys K (sections 2 to 4; in cross-attention section 7, option 1, or the first
layer's keys for all layers, the hybrid of section 7); or the values V, treated as K is. Keys or values that are not
stored are not computed for each position, unless that is less work: their projection is applied to the query, or to the
weighted sum.

`B` sentences, `M` beams, `H` query heads, `Hkv` key heads, `D` head size, `C` size of what is stored, `K` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import phases
from fastgen.layers.attention import beam_attention, fold_beams, may_take_triton
from fastgen.layers.fingerprints import states_of

__phase__ = phases.ATTENTION

Stored = tuple[Tensor, ...]
KINDS = ("x", "e", "h", "k", "v", "kv")  # in the order in which they are named


@dataclass(frozen=True)
class Choice:
    """What the layers of a call store for each position, as far as they can."""

    self_attn: str = "kv"  # in self-attention: keys and values, or "x", "k", "v"
    cross_attn: str = "kv"  # in cross-attention: keys and values, or "e", "h", "k", "v"


@dataclass(frozen=True)
class Projections:
    """The key and value projections of a layer, head by head: views of the model's own weights."""

    key: Tensor  # [Hkv, D, C]
    value: Tensor  # [Hkv, Dv, C]
    key_bias: Tensor | None = None  # [Hkv, D]
    value_bias: Tensor | None = None  # [Hkv, Dv]

    def keys_and_values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `inputs`, `[B, K, C]`: `[B, Hkv, K, D]` and `[B, Hkv, K, Dv]`."""
        return _projected(inputs, self.key, self.key_bias), _projected(inputs, self.value, self.value_bias)


class Slim:
    """Attention of one layer to the vectors that a slim cache stores, `[B, 1, K, C]`."""

    kind: str
    rotates = False

    def __init__(self, projections: Projections, threshold: float = 0.0) -> None:
        """`threshold`: attention weights below it are left out (section 3). More than 0 is an approximation."""
        self.projections, self.threshold = projections, threshold

    def attend(self, query: Tensor, stored: Stored, bias: Tensor | None, scale: float) -> Tensor:
        """Do what `fastgen.layers.attention.beam_attention` does, where keys or values are not stored.

        Args:
            query: `[B*M, H, 1, D]`; bias and scale: as in `beam_attention`.
            stored: `[B, 1, K, C]` and, if the cache `rotates`, cosine and sine of each position, `[B, 1, K, R]`.

        Returns: `[B*M, 1, H, Dv]`, of the query's dtype, contiguous.
        """
        raise NotImplementedError

    def keys_and_values(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, for code that needs them: `[B, Hkv, K, D]` and `[B, Hkv, K, Dv]`."""
        raise NotImplementedError


class InputCache(Slim):
    """Stores the layer's input: X in self-attention, the encoder output E in cross-attention.

    Head i's scores are `(q W_K,i) X^T`: in `q (X W_K,i^T + b_K,i)^T` the key's bias adds the same to all scores of a
    row, which the softmax does not see. Head i's output is `(P X) W_V,i^T + b_V,i`, as a row of P sums to 1. Results in
    between are float32; but on CUDA, where a trial allows it, one Triton kernel reads a half-precision X once.
    """

    kind = "x"

    def attend(self, query: Tensor, stored: Stored, bias: Tensor | None, scale: float) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        absorbed = _by_heads(query[:, :, 0].to(precise), self.projections.key.to(precise))[:, :, None]  # [B*M, H, 1, C]
        if self.threshold:
            inputs, bias = stored[0].to(precise), None if bias is None else bias.to(precise)
            sums = _sums(*_sparse(_weights(absorbed, inputs, bias, scale), self.threshold, inputs))[:, None]
        else:
            may_be_ours = may_take_triton(absorbed, *stored)
            ours = self._kernel(query, absorbed, stored, bias, scale) if may_be_ours else None
            sums = (ours or _attended)(absorbed, stored[0], bias, scale)  # [B*M, 1, H, C]
        return self._projected_back(sums, query.dtype)

    def _kernel(
        self, query: Tensor, absorbed: Tensor, stored: Stored, bias: Tensor | None, scale: float
    ) -> Callable[..., Tensor] | None:
        """The Triton kernel to use in place of `_attended`, if one is as exact as attention to keys and values."""
        from fastgen.layers.attention_kernels import Trial, latent_kernel_for  # brings Triton with it

        arguments = (absorbed, stored[0], bias, scale)
        trial = Trial(
            arguments,
            _attended,
            exact=lambda: self._projected_back(_attended(*arguments), absorbed.dtype),
            allowed=lambda: beam_attention(query, *self.keys_and_values(stored), bias, scale),
            finished=lambda sums: self._projected_back(sums, query.dtype),
        )
        return latent_kernel_for(trial, self.projections.key)

    def _projected_back(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """The attention output `[B*M, 1, H, Dv]`, computed from weighted sums of inputs, `[B*M, 1, H, C]`."""
        value, bias = self.projections.value.to(sums.dtype), self.projections.value_bias
        return _behind(sums[:, 0], value.transpose(1, 2), None if bias is None else bias.to(sums.dtype), dtype)

    def keys_and_values(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return self.projections.keys_and_values(stored[0][:, 0])


class HybridCache(InputCache):
    """Stores the first layer's cross-attention keys in place of E, for any layer (the hybrid of section 7)."""

    kind = "h"

    def __init__(self, projections: Projections, first: Projections, threshold: float = 0.0) -> None:
        """`projections`, `first`: of E, in this layer and in the first. Raises ValueError as `KeyCache` does."""
        through = [
            _from_one_to_the_other(first.key, weight, first.key_bias, bias)
            for weight, bias in (
                (projections.key, projections.key_bias),
                (projections.value, projections.value_bias),
            )
        ]
        (keys, key_bias), (values, value_bias) = through
        super().__init__(Projections(keys, values, key_bias, value_bias), threshold)


class KeyCache(Slim):
    """Stores keys only: `V = (K - b_K) W_KV + b_V`, where `W_KV` is a right inverse of W_K times W_V (equation 2.1,
    section 6, option 1). The condition number of W_K amplifies rounding: see `fastgen.cache.slim.accuracy`.

    With rotary positions (section 4) keys are stored before rotation, and rotated when they are read. With a threshold
    they are stored rotated, as the host has them, and only keys that the softmax keeps are rotated back.
    """

    kind = "k"

    def __init__(self, projections: Projections, threshold: float = 0.0, rotates: bool = False) -> None:
        """Raises ValueError if a position's keys have fewer numbers than the input: they do not determine values."""
        super().__init__(projections, threshold)
        self.rotates = rotates
        self._map, self._offset = _from_one_to_the_other(
            projections.key, projections.value, projections.key_bias, projections.value_bias
        )

    @property
    def is_stored_rotated(self) -> bool:
        return self.rotates and self.threshold > 0

    def attend(self, query: Tensor, stored: Stored, bias: Tensor | None, scale: float) -> Tensor:
        latent = stored[0]
        keys = self._keys(stored)
        if self._recomputes(len(query) // len(latent), latent.shape[2]):
            return beam_attention(query, keys, self._values(stored), bias, scale)
        weights = _weights(query, keys, bias, scale)
        if self.threshold:
            weights, latent, *rotation = _sparse(weights, self.threshold, *stored)
            latent = _rotated_back(keys.shape[1], latent, *rotation) if self.rotates else latent
        return _behind(_sums(weights, latent), self._map.transpose(1, 2), self._offset, query.dtype)

    def _recomputes(self, beams: int, positions: int) -> bool:
        """Whether computing all values is less work than summing keys for each head: equation 2.1's two orders."""
        heads, size, width = self._map.shape
        summed = beams * heads * width * (positions + size)
        return not self.threshold and positions * width * heads * size < summed

    def keys_and_values(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return self._keys(stored), self._values(stored)

    def _keys(self, stored: Stored) -> Tensor:
        keys = _heads_of(stored[0], len(self.projections.key))
        return rotated(keys, *stored[1:]) if self.rotates and not self.is_stored_rotated else keys

    def _values(self, stored: Stored) -> Tensor:
        latent, *rotation = stored
        if self.is_stored_rotated:
            latent = _rotated_back(len(self.projections.key), latent, *rotation)
        return _projected(latent[:, 0], self._map, self._offset)


class ValueCache(Slim):
    """Stores the values alone: `K = (V - b_V) W_VK + b_K`. Terms equal for all keys cancel in the softmax."""

    kind = "v"

    def __init__(self, projections: Projections, threshold: float = 0.0) -> None:
        """Raises ValueError if a position's values have fewer numbers than the input: they do not determine keys."""
        super().__init__(projections, threshold)
        self._map, self._offset = _from_one_to_the_other(
            projections.value, projections.key, projections.value_bias, projections.key_bias
        )

    def attend(self, query: Tensor, stored: Stored, bias: Tensor | None, scale: float) -> Tensor:
        absorbed = _by_heads(query[:, :, 0], self._map)[:, :, None]  # [B*M, H, 1, C]
        latent = stored[0]
        weights = _weights(absorbed, latent, bias, scale)
        if self.threshold:
            weights, latent = _sparse(weights, self.threshold, latent)
        output = weights @ _heads_of(latent, len(self.projections.value))  # [B, H, M, Dv]
        return output.transpose(1, 2).flatten(0, 1)[:, None].contiguous()

    def keys_and_values(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return _projected(stored[0][:, 0], self._map, self._offset), _heads_of(stored[0], len(self.projections.value))


def slim_cache(kind: str, projections: Projections, threshold: float = 0.0, rotates: bool = False) -> Slim:
    """The slim cache of a kind, "x", "e", "k" or "v"; `rotates`: keys are rotated by position once projected."""
    if kind == "k":
        return KeyCache(projections, threshold, rotates)
    if rotates:
        raise ValueError("keys that are rotated follow from what is stored only if that is the keys")
    return ValueCache(projections, threshold) if kind == "v" else InputCache(projections, threshold)


def attend(query: Tensor, stored: Stored, slim: Slim | None, bias: Tensor | None, scale: float) -> Tensor:
    """Attend to stored keys and values or, with a `slim` cache, to what is stored in their place."""
    if slim is not None:
        return slim.attend(query, stored, bias, scale)
    keys, values = stored
    return beam_attention(query, keys, values, bias, scale)


def keys_and_values(stored: Stored, slim: Slim | None) -> tuple[Tensor, Tensor]:
    """The stored keys and values or, with a `slim` cache, those computed from what is stored."""
    if slim is not None:
        return slim.keys_and_values(stored)
    keys, values = stored
    return keys, values


def identity_of(slim: Slim | None) -> Hashable:
    """A key that is equal for two caches if one can read what the other has stored.

    A cache that inverts a weight is the key: it is made anew when the weight changes. The others are views of weights.
    """
    if slim is None or slim.kind in ("h", "k", "v"):
        return slim
    return slim.kind, slim.threshold


def kind_of(self_attn: Iterable[Slim | None], cross_attn: Iterable[Slim | None]) -> str:
    """What a call's self-attention and cross-attention layers store, in one word."""
    kinds = {"kv" if slim is None else slim.kind for slim in self_attn}
    for slim in cross_attn:
        kind = "kv" if slim is None else slim.kind
        kinds.add("e" if kind == "x" else kind)
    return word_for(kinds)


def word_for(kinds: set[str]) -> str:
    """Several of `KINDS` joined to one word, such as "x+e"."""
    return "+".join(sorted(kinds, key=KINDS.index))


def _from_one_to_the_other(
    one: Tensor, other: Tensor, one_bias: Tensor | None, other_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The projection from outputs of `one` to outputs of `other` for the same input: weight `[H, D, C]` and offset
    `[H, D]`, float32, where C is H * D of `one`."""
    heads, size, _ = other.shape
    if one.shape[0] * one.shape[1] < one.shape[2]:
        raise ValueError(f"{one.shape[0] * one.shape[1]} numbers do not hold an input of {one.shape[2]}")
    inverse = torch.linalg.pinv(one.flatten(0, 1).double())  # [input, C]; its transpose is a right inverse of one^T
    weight = other.flatten(0, 1).double() @ inverse  # [H * D, C]
    offset = weight.new_zeros(heads * size)
    if other_bias is not None:
        offset += other_bias.flatten()
    if one_bias is not None:
        offset -= weight @ one_bias.flatten().double()
    return weight.float().unflatten(0, (heads, size)), offset.float().view(heads, size)


def state_of_weights(parameters: Iterable[Tensor]) -> Hashable:
    """A value that changes when these parameters' numbers or addresses change: slim caches hold views of them."""
    parameters = list(parameters)
    places = [(id(parameter), parameter.data_ptr(), parameter.stride()) for parameter in parameters]
    return tuple(zip(places, states_of(parameters), strict=True))


def condition(weight: Tensor) -> float:
    """The condition number of a projection `[H, D, C]`: the largest singular value over the smallest."""
    return float(torch.linalg.cond(weight.flatten(0, 1).double()))


def _projected(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[B, K, C]` -> `[B, Hkv, K, D]`."""
    heads, size, width = weight.shape
    bias = None if bias is None else bias.reshape(-1)
    return F.linear(inputs, weight.reshape(-1, width), bias).unflatten(2, (heads, size)).transpose(1, 2)


def _heads_of(stored: Tensor, heads: int) -> Tensor:
    """`[B, 1, K, H * D]` -> `[B, H, K, D]`, a view."""
    return stored[:, 0].unflatten(2, (heads, -1)).transpose(1, 2)


def _by_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's `rows`, `[R, H, I]`, by that head's `weight`, `[Hkv, I, O]`: `[R, H, O]`."""
    count, key_heads = len(rows), len(weight)
    by_key_head = rows.unflatten(1, (key_heads, -1)).transpose(0, 1).flatten(1, 2)  # [Hkv, R*G, I]
    return torch.bmm(by_key_head, weight).unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2)


def _attended(query: Tensor, latent: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of `query` `[B*M, H, 1, C]` to `latent` `[B, 1, K, C]` as keys and values: `[B*M, 1, H, C]`."""
    latent, bias = latent.to(query.dtype), None if bias is None else bias.to(query.dtype)
    return beam_attention(query, latent, latent, bias, scale)


def _behind(sums: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply heads' sums `[B*M, H, C]` by `weight` `[Hkv, C, D]`, add `bias` `[Hkv, D]`: `[B*M, 1, H, D]`."""
    output = _by_heads(sums, weight)
    if bias is not None:
        output = output.unflatten(1, (len(bias), -1)).add_(bias[:, None]).flatten(1, 2)
    return output[:, None].to(dtype).contiguous()


def _weights(query: Tensor, keys: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The softmax of attention of `query` `[B*M, H, 1, D]` to `keys` `[B, Hkv, K, D]`: `[B, H, M, K]`."""
    folded = fold_beams(query, *keys.shape[:2])  # [B, Hkv, G, M, D]
    scores = (folded.flatten(2, 3) * scale @ keys.transpose(2, 3)).unflatten(2, folded.shape[2:4]).flatten(1, 2)
    return (scores if bias is None else scores + bias).softmax(-1)


def _sums(weights: Tensor, stored: Tensor) -> Tensor:
    """Weighted sums of `stored`, `[B, 1, K, C]`, by `weights`, `[B, H, M, K]`: `[B*M, H, C]`."""
    sums = weights.flatten(1, 2) @ stored[:, 0]  # [B, H*M, C]
    return sums.unflatten(1, weights.shape[1:3]).transpose(1, 2).flatten(0, 1)


def _sparse(weights: Tensor, threshold: float, *stored: Tensor) -> list[Tensor]:
    """Weights `[B, H, M, K]` and stored vectors `[B, 1, K, C]` at the positions of a sentence where some weight reaches
    the threshold; smaller weights are set to zero."""
    weights = weights.masked_fill(weights < threshold, 0)
    matters = weights.flatten(1, 2).any(1)  # [B, K]
    most = max(int(matters.sum(1).max()), 1)
    places = matters.sort(dim=1, descending=True, stable=True)[1][:, None, :most]  # [B, 1, W]
    kept = [torch.take_along_dim(each, places[..., None], 2) for each in stored]
    return [torch.take_along_dim(weights, places[:, :, None], 3), *kept]


def rotated(keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`keys` `[B, H, K, D]`, of which the first R numbers are rotated as Llama does it: number i with R/2 + i.

    `cosine` and `sine`: `[B, 1, K, R]` (Su et al., "RoFormer", 2021, equation 34).
    """
    size = cosine.shape[-1]
    first, rest = keys[..., :size], keys[..., size:]
    halves = torch.cat((-first[..., size // 2 :], first[..., : size // 2]), dim=-1)
    return torch.cat((first * cosine + halves * sine, rest), dim=-1)


def _rotated_back(heads: int, latent: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Undo the rotation of the keys `latent`, `[B, 1, K, H * D]`; the result has the same shape."""
    scale = cosine * cosine + sine * sine  # not 1 where the host's rotation scales, too
    return rotated(_heads_of(latent, heads), cosine / scale, -sine / scale).transpose(1, 2).flatten(2)[:, None]
