"""Measures whether a layer's slim cache is exact enough: attention error on real activations, beside plain attention.

Storing the input is as exact as storing keys and values. Keys or values alone amplify rounding by the condition number
of the weight that has to be inverted; the error is measured, as bounds overestimate it by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen import locks
from fastgen.cache.slim.latent import HybridCache, Projections, Slim, condition, rotated, slim_cache
from fastgen.layers.attention import as_beams, beam_attention

_TINY = 1e-30  # a threshold that leaves out nothing, but runs the code for thresholds
LIMIT = 1e-5  # for caches that invert a weight: the largest error, relative to the largest number of the output
_TIMES_PLAIN, _ULPS = 2, 8  # for X and E: so many times plain attention's error, or so many units of rounding


@dataclass(frozen=True)
class Sample:
    """One call of an attention module, without a cache."""

    projections: Projections
    inputs: Tensor  # [B, K, C], what keys and values are projected from
    query: Tensor  # [B, H, P, D]
    bias: Tensor | None  # broadcastable to [B, H, P, K]
    scale: float
    rotation: tuple[Tensor, Tensor] | None = None  # cosine and sine of the keys' positions, [B, 1, K, R]
    first: Projections | None = None  # those of the first cross-attention layer, if this layer is one

    @locks.cached_property
    def exact(self) -> Tensor:
        """The attention's output `[B*P, 1, H, Dv]` in float64."""
        its = self.projections
        biases = (None if bias is None else bias.double() for bias in (its.key_bias, its.value_bias))
        doubled = Projections(its.key.double(), its.value.double(), *biases)
        keys, values = doubled.keys_and_values(self.inputs.double())
        bias = None if self.bias is None else self.bias.double()
        return beam_attention(as_beams(self.query.double()), _turned(keys, self), values, bias, self.scale)

    @locks.cached_property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the model's dtype, `[B, Hkv, K, D]` each; the keys are not rotated."""
        return self.projections.keys_and_values(self.inputs)

    @locks.cached_property
    def plain_error(self) -> float:
        """The error of attention to keys and values, in the dtype of the model."""
        keys, values = self.keys_and_values
        plain = beam_attention(as_beams(self.query), _turned(keys, self), values.contiguous(), self.bias, self.scale)
        return _error(plain, self.exact)


@dataclass(frozen=True)
class Verdict:
    """How exact one kind of slim cache is in one layer, and whether it is admitted."""

    error: float | None  # relative to the largest number of the output; None if there can be no such cache
    plain_error: float | None  # the same error where keys and values are stored
    condition: float | None = None  # condition number of the weight that is inverted
    reason: str | None = None  # why it is refused, None if it is admitted

    def __str__(self) -> str:
        return "-" if self.error is None else f"{self.error:.1e}{'' if self.reason is None else ' refused'}"


@torch.no_grad()
def judge(sample: Sample, kind: str, is_sparse: bool = False) -> Verdict:
    """The verdict on a cache of this kind ("x", "e", "h", "k" or "v"); `is_sparse`: with a threshold."""
    threshold = _TINY if is_sparse else 0.0
    projections, plain_error = sample.projections, sample.plain_error
    keys, values = sample.keys_and_values
    if kind in ("h", "k", "v") and sample.query.dtype != torch.float32:
        return Verdict(None, plain_error, reason=f"in {sample.query.dtype} nothing can be inverted")
    first = sample.first or projections
    inverted = {"h": first.key, "k": projections.key, "v": projections.value}.get(kind)
    try:
        if kind == "h":
            slim: Slim = HybridCache(projections, first, threshold)
        else:
            slim = slim_cache(kind, projections, threshold, rotates=sample.rotation is not None)
    except (ValueError, torch.linalg.LinAlgError) as failure:
        return Verdict(None, plain_error, reason=str(failure))
    latent = {"h": first.keys_and_values(sample.inputs)[0], "k": keys, "v": values}.get(kind)
    if latent is not None and getattr(slim, "is_stored_rotated", False):
        latent = _turned(latent, sample)
    stored = (sample.inputs if latent is None else latent.transpose(1, 2).flatten(2))[:, None]
    rotation = () if sample.rotation is None else sample.rotation
    error = _error(slim.attend(as_beams(sample.query), (stored, *rotation), sample.bias, sample.scale), sample.exact)
    if inverted is None:
        precision = torch.finfo(torch.promote_types(sample.query.dtype, torch.float32)).eps
        allowed = max(_TIMES_PLAIN * plain_error, _ULPS * precision)
        reason = None if error <= allowed else f"its attention errs by {error:.1e}, and with keys by {plain_error:.1e}"
        return Verdict(error, plain_error, reason=reason)
    number = condition(inverted)
    # NaN, too, is above the limit: it is not <= LIMIT.
    reason = (
        None if error <= LIMIT else f"its attention errs by {error:.1e} (limit {LIMIT:.0e}, condition {number:.0e})"
    )
    return Verdict(error, plain_error, number, reason)


def _turned(keys: Tensor, sample: Sample) -> Tensor:
    if sample.rotation is None:
        return keys.contiguous()
    return rotated(keys, *(each.to(keys.dtype) for each in sample.rotation))


def _error(output: Tensor, exact: Tensor) -> float:
    largest = float(exact.abs().max())
    return float((output.double() - exact).abs().max()) / max(largest, torch.finfo(torch.float64).tiny)
