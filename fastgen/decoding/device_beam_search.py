"""Beam search on a device that the CPU has to wait for: one wait a step, at the step's end.

No shape and no branch in the middle of a step depends on values; all that the CPU needs to know is read at once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.beam_search import BeamSearch, may_find_by_row
from fastgen.decoding.search import IsStopped

__phase__ = phases.CHOICE


class DeviceBeamSearch(BeamSearch):
    """Beam search for one request that does more operations than `BeamSearch` and waits for the device once a step."""

    _is_clear: Tensor | None = None  # whether candidates by row are those of `torch.topk`, bool, if not known yet

    def __init__(self, *arguments: Any, may_repeat_step: bool = False) -> None:
        """`arguments`: those of `BeamSearch`; `may_repeat_step`: `is_stopped` may be asked twice in a step, as where it
        depends only on the last token and the length."""
        super().__init__(*arguments)
        self._checks_late = may_repeat_step
        self._was_clear = True
        self._num_finished = 0

    def choose(self, log_probs: Tensor, is_stopped: IsStopped, sample: bool = False, is_tied: bool = False) -> Tensor:
        before = copy.copy(self.live), self.length
        parents = super().choose(log_probs, is_stopped, sample, is_tied)
        if self._was_clear:
            return parents
        # The step is undone, and done again without the operator that finds candidates by row.
        self.live, self.length = before
        return super().choose(log_probs, is_stopped, sample, is_tied=True)

    def choose_allowed(self, logits: Tensor, banned: Tensor, is_stopped: IsStopped) -> Tensor | None:
        before = copy.copy(self.live), self.length
        parents = super().choose_allowed(logits, banned, is_stopped)
        if self._was_clear:
            return parents
        (self.live, self.length), self.done, self._was_clear = before, False, True
        return None

    def num_finished(self) -> int:
        """How many sentences had finished after the latest step."""
        return self._num_finished

    def _candidates_by_row(
        self, scores: Tensor, banned: Tensor | None = None, are_logits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        from fastgen import ops
        from fastgen.ops.beam_search import merged_candidates

        if not may_find_by_row(scores, self.live.scores, self.candidates):
            return None
        log_probs, tokens, log_sum_exp = ops.topk_log_softmax(scores, self.candidates + 1, banned)  # [B*M, K+1]
        if not are_logits:
            log_probs = scores.gather(1, tokens)
        *found, is_clear = merged_candidates(log_probs, tokens, log_sum_exp, self.live.scores)
        if self._checks_late:
            self._is_clear = is_clear
        elif not bool(is_clear):
            return None
        best, tokens, parents = found
        return best, tokens, parents

    def _is_done(self, stopped: Tensor) -> bool:
        known = [self._goes_on(stopped), self.finished_mask().sum()]
        if self._is_clear is not None:
            known.append(self._is_clear)
        goes_on, self._num_finished, *is_clear = torch.stack(known).tolist()  # the one wait of a step
        self._is_clear, self._was_clear = None, all(is_clear)
        return not goes_on

    def _reorder(self, rows: Tensor) -> None:
        live = self.live  # whose tensors stay as they are, for a step that is repeated
        live.tokens, live.rows = of_rows(live.tokens, rows), of_rows(live.rows, rows)

    def _finish(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor) -> None:
        live, policy = self.live, self.policy
        finishing = stopped & self._best
        live.finished_scores, best = self._ranked(scores / policy.divisor(self.length + 1), finishing)
        live.is_finished = torch.cat([live.is_finished, finishing], dim=1).gather(1, best)
        step = self.length - policy.prompt_length
        live.finished_tokens, live.finished_rows = self._entered(best, tokens, parents, self.length, step)

    def _entered(
        self, best: Tensor, tokens: Tensor, parents: Tensor, length: int | Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best M of the finished hypotheses and the candidates: tokens `[B, M, L]` and rows `[B, M, L - prompt]`.

        Args:
            best: places among both, int64 `[B, M]`.
            tokens, parents: the candidates', `[B, K]` each.
            length, step: the columns of the candidates' tokens and rows, as numbers or int64 `[1]`.
        """
        live, beams = self.live, self.beams
        is_old = (best < beams)[:, :, None]
        old = (best.clamp(max=beams - 1) + self._first_row).flatten()
        candidate = (best - beams).clamp(min=0)
        parent = parents.gather(1, candidate)
        rows = (parent + self._first_row).flatten()
        found = []
        for finished, running, new, column in (
            (live.finished_tokens, live.tokens, tokens.gather(1, candidate), length),
            (live.finished_rows, live.rows, (parent + self._request_row).to(live.rows.dtype), step),
        ):
            entering = of_rows(running, rows)
            if isinstance(column, int):
                entering[:, :, column] = new
            else:
                entering.index_copy_(2, column, new[:, :, None])
            found.append(torch.where(is_old, of_rows(finished, old), entering))
        return found[0], found[1]


def of_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Select beams of `tensor`, `[B, M, ...]`, by their rows, int64 `[B*M]`, counted over the batch."""
    return tensor.flatten(0, 1).index_select(0, rows).view_as(tensor)
