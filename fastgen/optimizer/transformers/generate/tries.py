"""Which of the host's logits processors hold a `fastgen.Trie`, and need not be asked row by row."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from fastgen.decoding.trie import Trie
from fastgen.decoding.trie_rows import TrieRows


def constrains(processor: Any) -> bool:
    """Whether it is the host's processor for `prefix_allowed_tokens_fn`, and no subclass."""
    return type(processor) is logits_process.PrefixConstrainedLogitsProcessor


def trie_of(processor: Any) -> Trie | None:
    """The trie of the host's processor for `prefix_allowed_tokens_fn`; None for any other."""
    if not constrains(processor):
        return None
    function = processor._prefix_allowed_tokens_fn
    return function if type(function) is Trie else None


def has_trie(processors: Any) -> bool:
    return any(trie_of(processor) is not None for processor in processors)


def is_for(trie: Trie, sentences: int, vocabulary: int) -> bool:
    """Whether the host, too, could ask it for all of these sentences and tokens; otherwise it raises the error."""
    return trie.largest_token < vocabulary and (trie.num_sentences is None or trie.num_sentences >= sentences)


@functools.cache
def _forces_one() -> bool:
    """Whether this version of the host gives allowed tokens a score of 0 where others have banned all of them."""
    processor = logits_process.PrefixConstrainedLogitsProcessor(lambda sentence, tokens: [0], 1)
    scores = torch.full((1, 2), -float("inf"), device="cpu")
    found = processor(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), scores)
    return bool(found[0, 0] == 0)


class Constraint:
    """Does for a trie what the host's processor does: by the nodes it knows for rows that have grown by a token each,
    else by those that it finds anew."""

    def __init__(self, rows: TrieRows | None = None) -> None:
        """`rows`: those of a beam search, which moves them on itself."""
        self._rows, self._is_moved_on = rows, rows is not None
        self._processor: Any = None
        self._seen: Tensor | None = None  # the rows as they were at the last step

    def apply(self, processor: Any, trie: Trie, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores `[rows, V]` with -inf for each token that may not follow the row, int64 `[rows, length]`."""
        beams = processor._num_beams
        sentences, rest = divmod(input_ids.shape[0], beams)
        if rest or not is_for(trie, sentences, scores.shape[1]):
            found: Tensor = processor(input_ids, scores)
            return found
        mask = self._at(processor, trie, input_ids).mask(scores)
        masked = scores + mask
        if not _forces_one():
            return masked
        is_stuck = masked.amax(-1).isneginf().view(sentences, beams).all(-1, keepdim=True)
        return torch.where(is_stuck.repeat_interleave(beams, dim=0), mask, masked)

    def _at(self, processor: Any, trie: Trie, input_ids: Tensor) -> TrieRows:
        rows, seen = self._rows, self._seen
        if rows is not None and self._is_moved_on:
            return rows
        # A search may have moved the rows, or left some out: only their tokens tell.
        if rows is None or seen is None or processor is not self._processor:
            rows = TrieRows(trie, input_ids, processor._num_beams)
        elif torch.equal(seen, input_ids[:, :-1]):
            rows.advance(None, input_ids[:, -1])
        elif not torch.equal(seen, input_ids):
            rows = TrieRows(trie, input_ids, processor._num_beams)
        self._rows, self._processor, self._seen = rows, processor, input_ids.clone()
        return rows
