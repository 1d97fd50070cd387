"""The text of a hypothesis while it grows: which part stays as it is, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

INCOMPLETE = "\ufffd"  # what tokenizers write for a character of which tokens are missing
# Tokenizers that clean up spaces join " n't", " 've" and the like to the word before: by at most so many characters.
_CLEANED = 4


class Grown(NamedTuple):
    """What has become of a text."""

    new: str  # what may be sent
    is_stopped: bool  # a stop string has ended the text


class GrowingText:
    """Sends a text in pieces: what is sent is never taken back."""

    def __init__(self, stop: Sequence[str], *, cleans_up: bool) -> None:
        """`cleans_up`: whether the tokenizer removes spaces in front of what follows."""
        self._stop, self._cleans_up = tuple(stop), cleans_up
        self._sent = ""

    @property
    def sent(self) -> int:
        """The number of characters that may have been sent."""
        return len(self._sent)

    def grow(self, text: str) -> Grown:
        """Take the text of all tokens so far."""
        text = stable(text, cleans_up=self._cleans_up)
        if (place := stop_in(text, self._stop)) is not None:
            return Grown(self._send(text[:place]), True)
        return Grown(self._send(text[: len(text) - _begun(text, self._stop)]), False)

    def end(self, text: str) -> Grown:
        """Take the whole text."""
        place = stop_in(text, self._stop)
        return Grown(self._send(text[:place]), place is not None)

    def _send(self, text: str) -> str:
        if len(text) <= len(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def stable(text: str, *, cleans_up: bool) -> str:
    """The part of a text that further tokens do not change."""
    text = text.rstrip(INCOMPLETE)
    if cleans_up:
        place = text.find(" ", max(0, len(text) - _CLEANED))
        text = text if place < 0 else text[:place]
    return text


def settled(text: str, tokenizer: Any) -> str:
    """The part of a growing text that may be sent, without spaces at the end: what follows may remove them.

    Of tokenizers that put punctuation together again (Moses), whole words: there a character may be several tokens,
    such as `&apos;`.
    """
    if hasattr(tokenizer, "moses_detokenize"):
        return text[: max(text.rfind(" "), 0)]
    return stable(text, cleans_up=bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))).rstrip(" ")


def stop_in(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; None if there is none."""
    found = [(place + len(one), place) for one in stop if (place := text.find(one)) >= 0]
    return min(found)[1] if found else None


def tokens_until(tokens: list[int], has: Callable[[list[int]], bool]) -> int:
    """The number of tokens with which the text first has what the text of all of them has, such as a stop string."""
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if has(tokens[:middle]):
            high = middle
        else:
            low = middle + 1
    return high


def _begun(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(one.startswith(text[-n:]) for one in stop)), 0)
