"""PromptLookup, on texts whose continuation is known."""

from __future__ import annotations

import pytest

from fastgen.decoding.prompt_lookup import PromptLookup


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([5, 6, 7, 8], 3, []),
        ([5, 6, 7, 8, 9, 5, 6], 3, [7, 8, 9]),
        ([5, 6, 7, 8, 9, 6, 6, 7], 3, [8, 9, 6]),
        ([1, 6, 7, 8, 2, 6, 7, 9, 1, 6, 7], 2, [8, 2]),  # three tokens before two
        ([1, 6, 7, 8, 2, 6, 7, 9, 3, 6, 7], 2, [9, 3]),  # of two tokens the last occurrence
        ([4, 5, 6, 4, 5, 6, 4, 5, 6], 7, [4, 5, 6, 4, 5, 6, 4]),  # goes on repeating itself
        ([3, 3, 3], 4, [3, 3, 3, 3]),
    ],
)
def test_next(tokens: list[int], count: int, expected: list[int]) -> None:
    assert PromptLookup(tokens).next(count) == expected


def test_appending_is_the_same_as_beginning_with_all() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    found = PromptLookup([])
    for number, token in enumerate(tokens, 1):
        found.append(token)
        assert found.next(5) == PromptLookup(tokens[:number]).next(5)
