"""Texts in pieces: what is sent is never taken back, and ends before the stop string that is complete first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.pipeline.transformers.growing_text import GrowingText, settled, stop_in, tokens_until


def pieces(texts: Sequence[str], stop: Sequence[str] = (), *, cleans_up: bool = False) -> tuple[list[str], bool]:
    """What is sent for a text that grows through `texts`, the last of which is whole, and whether it was stopped."""
    growing, found = GrowingText(stop, cleans_up=cleans_up), list[str]()
    for text in texts[:-1]:
        new, is_stopped = growing.grow(text)
        found.append(new)
        if is_stopped:
            return found, True
    new, is_stopped = growing.end(texts[-1])
    return [*found, new], is_stopped


def test_characters_that_are_not_complete_wait() -> None:
    raw = "où 天é".encode()
    texts = [raw[: i + 1].decode("utf-8", "replace") for i in range(len(raw))]
    assert pieces(texts)[0] == ["o", "", "ù", " ", "", "", "天", "", "é"]
    assert pieces(texts[:6]) == (["o", "", "ù", " ", "", "\ufffd"], False)  # the end is what it is


def test_spaces_that_may_be_cleaned_up_wait() -> None:
    texts = ["do", "do n", "don't", "don't stop", "don't stop."]
    assert pieces(texts, cleans_up=True)[0] == ["do", "", "n't", " stop", "."]
    assert pieces(["天", "天地", "天地玄"], cleans_up=True)[0] == ["天", "地", "玄"]


@pytest.mark.parametrize(
    "stop, sent, is_stopped",
    (
        (["lo w"], ["he", "l", ""], True),
        (["world"], ["he", "ll", "o ", "", ""], True),
        (["xx", "wx"], ["he", "ll", "o ", "wor", "ld"], False),
        (["hello there"], ["", "", "hello w", "or", "ld"], False),
        (["h"], [""], True),
    ),
)
def test_the_beginning_of_a_stop_string_waits(stop: list[str], sent: list[str], is_stopped: bool) -> None:
    assert pieces(["he", "hell", "hello w", "hello wor", "hello world"], stop) == (sent, is_stopped)


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    assert stop_in("abcdef", ["abcde", "cd"]) == 2
    assert stop_in("abcdef", ["abcd", "cd"]) == 0  # at the same place: the longer one
    assert stop_in("abcdef", ["x"]) is None


@given(st.text("abc\ufffd ", max_size=30), st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3), st.randoms())
def test_however_a_text_grows_the_pieces_are_the_whole_up_to_the_stop(
    text: str, stop: list[str], chance: random.Random
) -> None:
    ends = sorted(chance.sample(range(len(text) + 1), chance.randrange(len(text) + 1)))
    place = stop_in(text, stop)
    found, is_stopped = pieces([*(text[:end] for end in ends), text], stop)
    assert "".join(found) == text[:place]
    assert is_stopped == (place is not None)


def test_tokens_are_counted_up_to_the_one_that_completes_a_stop_string() -> None:
    tokens = list(range(37))
    for last in tokens:
        assert tokens_until(tokens, lambda row, last=last: last in row) == last + 1


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ({}, ["天", "天", "天 a", "天 a b"]),
        ({"clean_up_tokenization_spaces": True}, ["天", "天", "天", "天"]),
        ({"moses_detokenize": None}, ["", "天", "天", "天 a"]),
    ],
)
def test_what_may_be_sent_is_without_the_space_behind_it(kind: dict[str, Any], wanted: list[str]) -> None:
    tokenizer = SimpleNamespace(**kind)
    assert [settled(text, tokenizer) for text in ("天", "天 ", "天 a\ufffd", "天 a b")] == wanted
