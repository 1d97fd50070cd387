"""Logits and banned tokens for tests of topk_log_softmax."""

from __future__ import annotations

import math

import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.integers(1, 4),
        "vocabulary": st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 1000, 4095, 4096, 4097, 9000])),
        "k": st.one_of(st.integers(1, 20), st.integers(1, 300), st.integers(1, 9000)),
        "values": st.sampled_from(["normal", "equal", "few", "sorted", "reversed", "wide", "special", "infinite"]),
        "dtype": st.sampled_from(oracle.DTYPES),
        "banned": st.sampled_from([None, "shared", "rows", "most", "best"]),
        "layout": st.sampled_from(["dense", "rows apart", "columns apart"]),
    }
)


def logits_of(values: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(rows, vocabulary, generator=generator) * 4
    if values == "equal":
        return torch.full_like(normal, 1.5)
    if values == "few":
        return normal.round() * 0.25
    if values == "sorted":
        return normal.sort(dim=1).values
    if values == "reversed":
        return normal.sort(dim=1, descending=True).values
    if values == "wide":  # beyond where exponentials vanish
        return normal * 200
    place = torch.rand(rows, vocabulary, generator=generator)
    if values == "special":  # mostly -inf
        return normal.masked_fill(place < 0.8, -math.inf).masked_fill(place > 0.999, math.nan)
    if values == "infinite":
        return normal.masked_fill(place < 0.3, -math.inf).masked_fill(place > 0.99, math.inf)
    return normal


def bans_of(kind: str | None, logits: Tensor, k: int, generator: torch.Generator) -> Tensor | None:
    rows, vocabulary = logits.shape
    if kind is None:
        return None
    if kind == "best":
        return logits.float().topk(min(k, vocabulary)).indices
    shape = (rows, 30) if kind == "rows" else (30,) if kind == "shared" else (3 * vocabulary,)
    return torch.randint(-5, vocabulary + 5, shape, generator=generator)  # some count for nothing


def laid_out(logits: Tensor, layout: str) -> Tensor:
    if layout == "columns apart":
        return logits.t().contiguous().t()
    if layout == "rows apart":
        return torch.cat([logits, torch.full_like(logits[:, :3], 99.0)], dim=1)[:, : logits.shape[1]]
    return logits
