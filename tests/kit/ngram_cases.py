"""Tokens for tests of the n-gram bans."""

from __future__ import annotations

from typing import Any

import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "rows": st.integers(1, 12),
        "length": st.integers(0, 40),
        "padding": st.integers(0, 5),
        "n": st.integers(1, 8),
        "kinds": st.integers(1, 6),  # few different tokens, or nothing repeats
        "vocabulary": st.integers(2, 50),
        "dtype": st.sampled_from(oracle.DTYPES),
        "token_dtype": st.sampled_from([torch.int64, torch.int32]),
        "layout": st.sampled_from(["dense", "transposed", "strided"]),
    }
)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 1]
    return tensor.clone()


def tokens_of(case: dict[str, Any], rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Some of them outside the vocabulary."""
    low = -1 if case["seed"] % 3 == 0 else 0
    tokens = torch.randint(low, case["kinds"], (rows, length), generator=generator)
    tokens *= case["seed"] % 7 + 1
    return laid_out(tokens.to(case["token_dtype"]), case["layout"])


def check_repeated(operators: Any, case: dict[str, Any]) -> None:
    """`ban_repeated_ngrams_` against brute force; it changes the scores alone."""
    generator = torch.Generator().manual_seed(case["seed"])
    tokens = tokens_of(case, case["rows"], case["length"] + case["padding"], generator)
    scores = torch.randn(case["rows"], case["vocabulary"], generator=generator).to(case["dtype"])
    expected = oracle.ban_repeated(tokens, scores, case["n"], case["length"])
    actual = laid_out(scores, case["layout"])
    before = tokens.clone()
    assert operators.ban_repeated_ngrams_(tokens, actual, case["n"], case["length"]) is None
    assert torch.equal(actual, expected)
    assert torch.equal(tokens, before)


def check_source(operators: Any, case: dict[str, Any], beams: int, source_length: int) -> None:
    """`ban_source_ngrams_` against brute force."""
    generator = torch.Generator().manual_seed(case["seed"])
    rows = case["rows"] * beams
    source = tokens_of(case, case["rows"], source_length, generator)
    tokens = tokens_of(case, rows, case["length"] + case["padding"], generator).long()  # types may differ
    scores = torch.randn(rows, case["vocabulary"], generator=generator).to(case["dtype"])
    expected = oracle.ban_source(source, tokens, scores, case["n"], case["length"], beams)
    actual = laid_out(scores, case["layout"])
    operators.ban_source_ngrams_(source, tokens, actual, case["n"], case["length"], beams)
    assert torch.equal(actual, expected)
