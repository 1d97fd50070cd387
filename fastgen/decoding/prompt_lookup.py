"""Prompt look-up: what followed the last few tokens when they were there before is what may follow them now.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 3  # last tokens that are looked for, the most first
_SHORTEST = 2


class PromptLookup:
    """The tokens of one sentence so far, and where each of their n-grams was seen last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the place after it
        self._found: int | None = None  # the place after an earlier occurrence of the last tokens
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._found = None
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            if len(self.tokens) < size:
                continue
            ngram = tuple(self.tokens[-size:])
            if self._found is None:
                self._found = self._after.get(ngram)
            self._after[ngram] = len(self.tokens)

    def next(self, count: int) -> list[int]:
        """The `count` tokens that followed last time; nothing if the last tokens are new.

        Where the text ends before, it is taken to go on repeating itself.
        """
        if self._found is None:
            return []
        followed = self.tokens[self._found : self._found + count]
        return (followed * (count // len(followed) + 1))[:count]
