"""Builds the arrays of a trie, level by level."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

_CHUNK = 4096  # lines that a tokenizer reads at once
_TOKENS = 2**31  # tokens are numbers below this
_DIGITS = 10  # of the largest token


class Collected:
    """Sequences, one after the other in one array."""

    def __init__(self, eos_token_id: int) -> None:
        is_number = isinstance(eos_token_id, (int, np.integer)) and not isinstance(eos_token_id, bool)
        if not is_number or not 0 <= eos_token_id < _TOKENS:
            raise ValueError(f"eos_token_id={_shown(eos_token_id)} is no token.")
        self._end = int(eos_token_id)
        self._tokens, self._lengths = array("i"), array("q")
        self.sizes: list[int] = []  # sequences of each set

    def add(self, sequences: Iterable[Any]) -> None:
        """Add one set of sequences."""
        tokens, lengths, end, before = self._tokens, self._lengths, self._end, len(self._lengths)
        for sequence in sequences:
            start = len(tokens)
            try:
                # A string is iterable, too, and bytes would pass for tokens.
                if isinstance(sequence, (str, bytes)):
                    raise TypeError
                tokens.extend(sequence.tolist() if isinstance(sequence, (Tensor, np.ndarray, array)) else sequence)
            except (TypeError, OverflowError):
                raise ValueError(f"Sequence {len(lengths)} is no list of token ids: {_shown(sequence)}.") from None
            if len(tokens) == start or tokens[-1] != end:
                tokens.append(end)
            lengths.append(len(tokens) - start)
        self.sizes.append(len(lengths) - before)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The trie's tokens, int32 `[nodes]`, and first children, int32 `[nodes + 1]`; there is a root for each set."""
        if not self._lengths:
            raise ValueError("A trie needs at least one sequence.")
        if 0 in self.sizes:
            raise ValueError(f"There is no sequence for sentence {self.sizes.index(0)}.")
        values = np.frombuffer(self._tokens, dtype=np.dtype("i"))
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        self._check(values, lengths)
        return _build(values, lengths, np.repeat(np.arange(len(self.sizes)), self.sizes), len(self.sizes))

    def _check(self, values: np.ndarray, lengths: np.ndarray) -> None:
        ends = lengths.cumsum()
        if values.min() < 0:
            place = int(np.argmax(values < 0))
            number = np.searchsorted(ends, place, side="right")
            raise ValueError(f"Sequence {number} holds {values[place]}, which is no token.")
        is_early = values == self._end
        is_early[ends - 1] = False
        if is_early.any():
            number = np.searchsorted(ends, int(np.argmax(is_early)), side="right")
            raise ValueError(
                f"Sequence {number} holds the end token, {self._end}, before its end. A sequence is what follows the "
                "prompt: the token that the decoder begins with does not belong to it."
            )


def _build(values: np.ndarray, lengths: np.ndarray, root: np.ndarray, roots: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of the trie of sequences that lie one after the other in `values`, each below its root.

    Nodes of one level are numbered by parent and token, which sorting both as one number does.
    """
    starts = lengths.cumsum() - lengths
    width = int(values.max()) + 1
    tokens, num_children = [np.full(roots, -1, dtype=np.int32)], []
    parent, size, depth = root, roots, 0  # of the sequences that are longer than `depth`: their node in its level
    while len(starts):
        keys, place = np.unique(parent * width + values[starts + depth], return_inverse=True)
        num_children.append(np.bincount(keys // width, minlength=size))
        tokens.append((keys % width).astype(np.int32))
        size, depth = len(keys), depth + 1
        goes_on = lengths > depth
        starts, lengths, parent = starts[goes_on], lengths[goes_on], place[goes_on]
    num_children.append(np.zeros(size, dtype=np.int64))
    first_child = np.concatenate([np.zeros(1, dtype=np.int64), *num_children]).cumsum() + roots
    if first_child[-1] >= 2**31:
        raise ValueError(f"The trie would have {first_child[-1]} nodes, and the most is {2**31 - 1}.")
    return np.concatenate(tokens), first_child.astype(np.int32)


def are_sound(tokens: Any, first_child: Any, roots: int, end: int) -> bool:
    """Whether arrays that come from a file are those of a trie."""
    if any(each.dtype != np.int32 or each.ndim != 1 for each in (tokens, first_child)):
        return False
    nodes = len(tokens)
    if not 1 <= roots < nodes or len(first_child) != nodes + 1 or (tokens[:roots] != -1).any():
        return False
    if (first_child[0], first_child[-1]) != (roots, nodes) or (np.diff(first_child) < 0).any():
        return False
    if (first_child[:-1] <= np.arange(nodes)).any() or (tokens[roots:] < 0).any():
        return False
    is_leaf = first_child[1:] == first_child[:-1]
    if not (is_leaf[roots:] == (tokens[roots:] == end)).all() or is_leaf[:roots].any():
        return False
    is_first = np.zeros(nodes + 1, dtype=bool)
    is_first[first_child] = True
    return bool((is_first[roots + 1 : nodes] | (np.diff(tokens[roots:]) > 0)).all())


def lines_of(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The lines of a file in UTF-8, without the blank ones, each with its number, from 1 on.

    Raises:
        ValueError: a line is not UTF-8.
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.isascii():
                try:
                    line.encode()  # bytes that are no UTF-8 have become halves of characters
                except UnicodeEncodeError:
                    raise ValueError(f"{os.fspath(path)}, line {number} is not UTF-8.") from None
                if number == 1:
                    line = line.removeprefix("\ufeff")  # a byte order mark
            if line.strip():
                yield number, line.rstrip("\r\n")


def sequences_of(path: str | os.PathLike[str], tokenizer: Any, end: int, special_tokens: bool) -> Iterator[list[int]]:
    """The sequences in a file, one a line: see `Trie.from_file`."""
    lines = lines_of(path)
    found = _ids(path, lines, end) if tokenizer is None else _encoded(path, lines, tokenizer, end, special_tokens)
    is_empty = True
    for sequence in found:
        is_empty = False
        yield sequence
    if is_empty:
        raise ValueError(f"{os.fspath(path)} holds no sequence.")


def _ids(path: str | os.PathLike[str], lines: Iterable[tuple[int, str]], end: int) -> Iterator[list[int]]:
    for number, line in lines:
        words = line.split()
        if wrong := [word for word in words if not _is_token(word)]:
            raise ValueError(f"{os.fspath(path)}, line {number}: {wrong[0][:40]!r} is no token id.")
        tokens = [int(word[-_DIGITS:]) for word in words]  # what is before those are zeros
        if end in tokens[:-1]:
            raise ValueError(f"{os.fspath(path)}, line {number} holds the end token, {end}, before its end.")
        yield tokens


def _is_token(word: str) -> bool:
    if not (word.isascii() and word.isdecimal()):
        return False
    digits = word.lstrip("0")
    return len(digits) < _DIGITS or (len(digits) == _DIGITS and int(digits) < _TOKENS)


def _encoded(
    path: str | os.PathLike[str], lines: Iterable[tuple[int, str]], tokenizer: Any, end: int, special_tokens: bool
) -> Iterator[list[int]]:
    def encoded(chunk: list[tuple[int, str]]) -> Iterator[list[int]]:
        texts = [line for _, line in chunk]
        found = tokenizer(text_target=texts, add_special_tokens=special_tokens, verbose=False).input_ids
        for (number, _), tokens in zip(chunk, found, strict=True):
            if end not in tokens:
                yield tokens
                continue
            place = tokens.index(end)
            behind = tokens[place + 1 :]
            # Some put the language behind the end, where no search gets.
            if not place or end in behind or (behind and not special_tokens):
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: the tokenizer writes the end token, {end}, before the text is "
                    "over."
                )
            yield tokens[:place]

    waiting = iter(lines)
    while chunk := list(islice(waiting, _CHUNK)):
        yield from encoded(chunk)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        text = f"too large a number, in a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
