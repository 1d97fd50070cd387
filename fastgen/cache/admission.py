"""Whether a layer's slim cache is exact enough: its attention's error on real activations, against plain attention's.

The input's cache is as exact as keys and values. Keys or values alone amplify rounding by the condition of the weight
that has to be inverted; what comes of that is measured, for bounds overestimate it by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.attention import beam_attention
from fastgen.cache.slim import HybridCache, Projections, Slim, condition, rotated, slim_cache

_TINY = 1e-30  # as a threshold it leaves out nothing, and takes the way of those that do
LIMIT = 1e-5  # of what inverts a weight: the error relative to the largest number of the output
_TIMES_PLAIN, _ULPS = 2, 8  # of X and E: so many times plain attention's error, or what tells nothing


@dataclass(frozen=True)
class Sample:
    """One call of an attention module, without a cache."""

    projections: Projections
    inputs: Tensor  # [B, K, C], what keys and values are projected from
    query: Tensor  # [B, H, P, D]
    bias: Tensor | None  # broadcastable to [B, H, P, K]
    scale: float
    rotation: tuple[Tensor, Tensor] | None = None  # cosine and sine of the keys' positions, [B, 1, K, R]
    first: Projections | None = None  # of the first layer that attends to the source, if this one does


@dataclass(frozen=True)
class Verdict:
    """On one kind of cache of one layer."""

    error: float | None  # relative to the largest number of the output; None if it cannot be had at all
    plain_error: float | None  # of keys and values
    condition: float | None = None  # of what is inverted
    reason: str | None = None  # why not, None if it is admitted

    def __str__(self) -> str:
        return "-" if self.error is None else f"{self.error:.1e}{'' if self.reason is None else ' refused'}"


@torch.no_grad()
def judge(sample: Sample, kind: str, is_sparse: bool = False) -> Verdict:
    """Of a cache of this kind, one of "x", "e", "h", "k" and "v"; `is_sparse`: that has a threshold."""
    threshold = _TINY if is_sparse else 0.0
    exact, projections = _exact(sample), sample.projections
    keys, values = projections.keys_and_values(sample.inputs)
    plain = beam_attention(_rows(sample.query), _turned(keys, sample), values.contiguous(), sample.bias, sample.scale)
    plain_error = _error(plain, exact)
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
    error = _error(slim.attend(_rows(sample.query), (stored, *rotation), sample.bias, sample.scale), exact)
    if inverted is None:
        precision = torch.finfo(torch.promote_types(sample.query.dtype, torch.float32)).eps
        allowed = max(_TIMES_PLAIN * plain_error, _ULPS * precision)
        reason = None if error <= allowed else f"its attention errs by {error:.1e}, and with keys by {plain_error:.1e}"
        return Verdict(error, plain_error, reason=reason)
    number = condition(inverted)
    # A value that is no number is above any limit, too.
    reason = (
        None if error <= LIMIT else f"its attention errs by {error:.1e} (limit {LIMIT:.0e}, condition {number:.0e})"
    )
    return Verdict(error, plain_error, number, reason)


def _exact(sample: Sample) -> Tensor:
    """The attention's output `[B*P, 1, H, Dv]` in float64."""
    its = sample.projections
    biases = (None if bias is None else bias.double() for bias in (its.key_bias, its.value_bias))
    doubled = Projections(its.key.double(), its.value.double(), *biases)
    keys, values = doubled.keys_and_values(sample.inputs.double())
    bias = None if sample.bias is None else sample.bias.double()
    return beam_attention(_rows(sample.query.double()), _turned(keys, sample), values, bias, sample.scale)


def _turned(keys: Tensor, sample: Sample) -> Tensor:
    if sample.rotation is None:
        return keys.contiguous()
    return rotated(keys, *(each.to(keys.dtype) for each in sample.rotation))


def _rows(query: Tensor) -> Tensor:
    """A sentence's queries as its beams: `[B, H, P, D]` -> `[B*P, H, 1, D]`."""
    return query.transpose(1, 2).flatten(0, 1)[:, :, None]


def _error(output: Tensor, exact: Tensor) -> float:
    largest = float(exact.abs().max())
    return float((output.double() - exact).abs().max()) / max(largest, torch.finfo(torch.float64).tiny)
