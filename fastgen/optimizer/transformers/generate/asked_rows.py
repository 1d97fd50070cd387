"""What a function of the user's, a `prefix_allowed_tokens_fn`, allows after each row of one step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.trie_rows import Following

__phase__ = phases.CHOICE

_DENSE = 4  # if more than one in so many tokens may follow, a mask of all tokens is as good


class AskedRows:
    """The answers about all rows of a step, as the host's processor would ask for them."""

    def __init__(self) -> None:
        self._following: Following | None = None

    def ask(self, processor: Any, input_ids: Tensor, vocabulary: int) -> Any:
        """Ask the function of the host's processor once about each row, int64 `[B*M, length]`, in the host's order.

        Returns a processor of the host's that goes by these answers, for where the scores of all tokens are needed.
        """
        function, beams = processor._prefix_allowed_tokens_fn, processor._num_beams
        answers: list[Any] = []
        for row in range(input_ids.shape[0]):
            answer = function(row // beams, input_ids[row])
            is_last = len(answer) == 0  # here the host raises its error, and asks no further
            answers.append(_kept(answer))
            if is_last:
                break
        self._following = _following(answers, input_ids, vocabulary)
        left = iter(answers)
        answered = copy.copy(processor)
        answered._prefix_allowed_tokens_fn = lambda sentence, tokens: next(left)
        return answered

    def children(self, rows: Tensor | None = None) -> Following | None:
        """What may follow these rows, int64 `[n]` in ascending order, or all; None where only a mask can tell."""
        found = self._following
        if rows is None or found is None:
            return found
        is_wanted = torch.zeros(len(found.counts), dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        some = is_wanted.index_select(0, found.rows)
        return Following(found.rows[some], found.tokens[some], found.counts.index_select(0, rows))

    def advance(self, parents: Tensor | None, tokens: Tensor, children: Following | None = None) -> None:
        """Each row continues another: the next step asks anew."""
        self._following = None

    def select(self, rows: Tensor) -> None:
        """Rows are dropped of no search that asks a function: it is asked about all of them, as the host does."""
        raise AssertionError("a search that asks a function keeps the rows of all sentences")


def _kept(answer: Any) -> Any:
    """The answer as it is now: the host uses an answer before it asks for the next, which may fill the same list."""
    if isinstance(answer, Tensor):
        return answer.clone()
    try:
        return copy.copy(answer)
    except (TypeError, copy.Error):  # such as the keys of a dict: the host says what it makes of them
        return answer


def _following(answers: list[Any], input_ids: Tensor, vocabulary: int) -> Following | None:
    """The answers as numbers; None if they are no lists of tokens of the vocabulary, or too many tokens."""
    rows = input_ids.shape[0]
    counts = [len(answer) for answer in answers]
    if len(answers) != rows or not all(counts) or sum(counts) * _DENSE > rows * vocabulary:
        return None
    # The host indexes a tensor by an answer, which may be a mask, or count from the end.
    if not all(type(answer) is list for answer in answers):
        return None
    try:
        arrays = [np.array(answer) for answer in answers]
    except ValueError:  # lists of lists
        return None
    if not all(array.dtype == np.int64 and array.ndim == 1 for array in arrays):
        return None
    tokens = np.concatenate(arrays)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        return None
    places = np.repeat(np.arange(rows), counts) * vocabulary + tokens
    if not (places[1:] > places[:-1]).all():
        places = np.unique(places)  # sorted; what is said twice is allowed once
    row, token = np.divmod(places, vocabulary)
    found = (torch.from_numpy(numbers).to(input_ids.device) for numbers in (row, token, np.bincount(row)))
    return Following(*found)
