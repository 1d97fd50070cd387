"""Bans of repeated n-grams, against the definition written out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from fastgen.decoding.ngrams import ban_repeated_ngrams  # noqa: E402

VOCABULARY, NEVER = 6, 1


def banned(tokens: list[int], size: int) -> set[int]:
    """Tokens at position 1 or later that complete an n-gram which the hypothesis already has."""
    last = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1)
    return {tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last and i + size - 1 > 0}


@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_against_the_definition(data: st.DataObject, size: int, length: int, rows: int) -> None:
    token = st.sampled_from([0, 2, 3, 4, 5])
    tokens = [data.draw(st.lists(token, min_size=length, max_size=length)) for _ in range(rows)]
    scores = torch.randn(rows, VOCABULARY)
    scores[:, NEVER] = -math.inf
    before = scores.clone()
    assert ban_repeated_ngrams(scores, torch.tensor(tokens), size, NEVER) is scores
    for row, hypothesis in enumerate(tokens):
        expected = banned(hypothesis, size) | {NEVER}
        assert set(torch.nonzero(torch.isinf(scores[row]))[:, 0].tolist()) == expected
        rest = [other for other in range(VOCABULARY) if other not in expected]
        assert torch.equal(scores[row, rest], before[row, rest])


def test_the_start_is_no_repetition() -> None:
    """Every hypothesis starts with the end token: it may still end."""
    scores = torch.zeros(1, VOCABULARY)
    ban_repeated_ngrams(scores, torch.tensor([[2, 4, 5]]), 1, NEVER)
    assert torch.nonzero(torch.isinf(scores[0]))[:, 0].tolist() == [4, 5]


def test_no_ngram_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        ban_repeated_ngrams(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64), 0, NEVER)
