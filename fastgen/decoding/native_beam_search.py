"""Beam search on a CPU, a step of which is one native operator wherever no two scores are equal.

Only what nobody sees differs from `BeamSearch` on the way. A place that no finished hypothesis has taken yet holds, in
the host, some candidate that did not end: `torch.topk` has to fill M places, and those candidates all count -1e9. The
operator leaves such places as they are. Should a search end with one, the steps are done again by torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.beam_search import BeamSearch, _Live
from fastgen.decoding.search import Hypotheses

__phase__ = phases.CHOICE

_MOST_MISSES = 4  # after more steps in a row for torch, as with candidates that are drawn, the operator is not tried


@dataclass(frozen=True)
class _Step:
    """What a step went on with: candidates `[B, K]`, and the sentences, `[B]`, as they were numbered in the request."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    stopped: Tensor
    sentence: Tensor

    def of(self, sentences: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The candidates of these sentences, int64 `[B']`, which were all alive."""
        places = (self.sentence == sentences[:, None]).long().argmax(dim=1)
        scores, tokens, parents, stopped = (
            each.index_select(0, places) for each in (self.scores, self.tokens, self.parents, self.stopped)
        )
        return scores, tokens, parents, stopped


class NativeBeamSearch(BeamSearch):
    """Beam search for one request whose steps are done by `fastgen.ops.advance_beams_`, where that decides."""

    def _begin(self, live: _Live) -> None:
        super()._begin(live)
        self._steps: list[_Step] = []  # so far, as long as a sentence has a place that none has taken
        self._has_places, self._has_skipped = True, False  # such a place; one that the operator has left as it was
        self._misses = 0
        self._num_finished: int | None = None  # after the last step, if that is known

    def _advance(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor) -> Tensor:
        self._num_finished = None
        if self._misses > _MOST_MISSES and not self._has_skipped:
            self._steps.clear()
            return super()._advance(scores, tokens, parents, stopped)
        if self._has_places:
            self._steps.append(_Step(scores, tokens, parents, stopped, self.live.sentence))
        rows = self._by_operator(scores, tokens, parents, stopped)
        if rows is None:
            self._misses += 1
            return super()._advance(scores, tokens, parents, stopped)
        self._misses = 0
        if not self._has_places:
            self._steps.clear()
        return rows

    def _by_operator(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor) -> Tensor | None:
        """Do what `_advance` does; None, and nothing, if torch has to."""
        from fastgen import ops

        live, policy, length = self.live, self.policy, self.length
        if {scores.dtype, live.scores.dtype, live.finished_scores.dtype} != {torch.float32}:
            return None  # a logits processor has changed the dtype
        # Beyond the maximal length torch raises the error.
        if stopped.dtype != torch.bool or length >= live.tokens.shape[2] or not ops.is_native(scores.device):
            return None
        rows, state = ops.advance_beams_(
            live.tokens,
            live.rows,
            live.scores,
            live.finished_tokens,
            live.finished_rows,
            live.finished_scores,
            live.is_finished,
            live.improvable,
            live.sentence,
            scores.contiguous(),
            tokens.contiguous(),
            parents.contiguous(),
            stopped.contiguous(),
            length,
            policy.prompt_length,
            policy.divisor(length + 1),
            policy.best_divisor(length + 1),
            policy.early_stopping is True,
        )
        is_done, goes_on, num_finished, num_places = state.tolist()
        if not is_done:
            return None
        self._num_finished, self._has_places = num_finished, num_places > 0
        self._has_skipped = self._has_places
        self.length += 1
        self.done = not goes_on
        return rows

    def num_finished(self) -> int:
        return super().num_finished() if self._num_finished is None else self._num_finished

    def evict(self, leaving: Tensor) -> Tensor:
        self._num_finished = None
        return super().evict(leaving)

    def hypotheses(self, row: int) -> tuple[Tensor, Tensor]:
        self._fill_places(torch.tensor([row], device=self.live.sentence.device))
        return super().hypotheses(row)

    def result(self) -> Hypotheses:
        self._fill_places(torch.arange(self.batch, device=self.live.sentence.device))
        return super().result()

    def _fill_places(self, rows: Tensor) -> None:
        """Put in the places of these live sentences, int64 `[n]`, that none has taken what the host has there."""
        if not self._has_skipped:
            return
        live = self.live
        left = rows[~live.is_finished[rows].all(dim=1)]
        if not len(left):
            return
        sentences, prompt_length = live.sentence[left], self.policy.prompt_length
        prompt = live.tokens[left, :, :prompt_length].flatten(0, 1)
        again = BeamSearch(prompt, self.beams, self.candidates, self.policy, self._fill)
        again.live.sentence = sentences
        again._number_rows()
        for step in self._steps:
            again._advance(*step.of(sentences))
        live.finished_tokens[left], live.finished_rows[left] = again.live.finished_tokens, again.live.finished_rows
