"""Beam search among the tokens that a trie, or a function of the user's, allows: scores of others are neither masked
nor added up nor ranked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from fastgen import phases
from fastgen.decoding.beam_search import BeamSearch
from fastgen.decoding.search import IsStopped
from fastgen.decoding.trie_rows import Following, TrieRows
from fastgen.optimizer.transformers.generate import tries
from fastgen.optimizer.transformers.generate.asked_rows import AskedRows
from fastgen.optimizer.transformers.generate.processors import Processing, bans_everywhere
from fastgen.optimizer.transformers.request import Request

__phase__ = phases.CHOICE

_LEAST = -5.0e8  # beams that must not be chosen have a score of -1e9, and the others are far above


class Begun(NamedTuple):
    """A step's scores after some processors, `[B*M, V]`, and the processors that are still to be called."""

    scores: Tensor
    processors: LogitsProcessorList
    tokens: Tensor  # int64 [B*M, length]: what has been given to the processors


class AllowedTokens:
    """What may follow each beam of one request, by a trie or by a function of the user's, and the choice among it."""

    def __init__(self, rows: TrieRows | AskedRows) -> None:
        self.rows = rows
        self.begun: Begun | None = None  # what `choose` leaves to be done where it has chosen nothing

    @classmethod
    def of(cls, request: Request, vocabulary: int) -> AllowedTokens | None:
        """None if the request's beams are not constrained by `prefix_allowed_tokens_fn`, or not by one alone."""
        processors = request.logits_processor
        if not request.is_beam_search or type(processors) is not LogitsProcessorList:
            return None
        found = [one for one in processors if tries.constrains(one)]
        if len(found) != 1 or found[0]._num_beams != request.beams:
            return None
        trie = tries.trie_of(found[0])
        if trie is None:
            return cls(AskedRows())
        if not tries.is_for(trie, request.batch, vocabulary):
            return None
        return cls(TrieRows(trie, request.input_ids, request.beams))

    def choose(
        self,
        search: BeamSearch,
        tokens: Tensor,
        processors: Any,
        process: Processing,
        logits: Tensor,
        is_stopped: IsStopped,
    ) -> Tensor | None:
        """Do what `search.choose` does after `processors`, which are shown `tokens`, the rows so far, int64
        `[B*M, length]`; `logits` float32 `[B*M, V]`.

        Returns the parents' rows, int64 `[B*M]`; None, having chosen nothing, if the scores of all tokens are needed:
        then `begun` says what has been done already, as no processor is to be called twice.
        """
        self.begun = None
        vocabulary, beams = logits.shape[1], search.beams
        parts = _parts(processors, search.length)
        if parts is None or not search.may_choose_among(vocabulary):
            return None
        before, bans, rest = parts
        processed = process(before, tokens, logits)  # [B*M, V]
        scores = process.apply(bans, tokens, processed)
        if isinstance(self.rows, AskedRows):
            rest[0] = self.rows.ask(rest[0], tokens, vocabulary)
        self.begun = Begun(processed, rest, tokens)
        if not (all(map(bans_everywhere, before)) or bool(scores.amax() < float("inf"))):
            return None  # infinity or NaN is NaN in the end, even where it is not allowed, and ranks first
        if search.length == search.policy.prompt_length and beams > 1 and search.candidates <= vocabulary:
            # All beams but the first are dead and alike: no token of theirs is chosen if the first has enough.
            first = torch.arange(0, len(scores), beams, device=scores.device)
            following = self.rows.children(first)
            if following is not None and bool((following.counts >= search.candidates).all()):
                parents = self._among(search, scores, following, first, is_stopped, _LEAST)
                if parents is not None:
                    return parents
        following = self.rows.children()
        if following is None:
            return None
        every = torch.arange(len(scores), device=scores.device)
        return self._among(search, scores, following, every, is_stopped)

    def _among(
        self,
        search: BeamSearch,
        scores: Tensor,
        following: Following,
        rows: Tensor,
        is_stopped: IsStopped,
        least: float = -float("inf"),
    ) -> Tensor | None:
        values = scores[following.rows, following.tokens]  # [E]
        # NaN ranks first, even where it is not allowed; a row that holds one has no numbers left.
        numbers = following.rows[values.isfinite()]
        has_numbers = torch.zeros(len(scores), dtype=torch.bool, device=scores.device).index_fill_(0, numbers, True)
        if bool(values.isnan().any()) or not bool(has_numbers.index_select(0, rows).all()):
            return None
        parents = search.choose_among(values, following.rows, following.tokens, scores.shape[1], is_stopped, least)
        if parents is not None:
            self.advance(search, parents, following)
        return parents

    def advance(self, search: BeamSearch, parents: Tensor, following: Following | None = None) -> None:
        """Move on by what the search has chosen; `following`: what might follow the parents, if it is known."""
        self.begun = None
        self.rows.advance(parents, search.live.tokens[:, :, search.length - 1].flatten(), following)

    def select(self, rows: Tensor) -> None:
        """Drop all rows but these, int64 `[rows']`."""
        self.rows.select(rows)


def _parts(processors: Any, length: int) -> tuple[LogitsProcessorList, LogitsProcessorList, LogitsProcessorList] | None:
    """The processors before the one that constrains, those after it that ban tokens, and all from it on; None if one of
    the last does anything else."""
    before, bans, rest = (LogitsProcessorList() for _ in range(3))
    for one in processors:
        if rest or tries.constrains(one):
            rest.append(one)
            if bans_everywhere(one):  # before or after the choice of allowed tokens is the same
                bans.append(one)
            elif len(rest) > 1 and not _is_idle(one, length):
                return None
        else:
            before.append(one)
    return before, bans, rest


def _is_idle(processor: Any, length: int) -> bool:
    """Whether it leaves the scores as they are at this length."""
    if type(processor) is logits_process.ForcedBOSTokenLogitsProcessor:
        return length != 1
    if type(processor) is logits_process.ForcedEOSTokenLogitsProcessor:
        return bool(length != processor.max_length - 1)
    return False
