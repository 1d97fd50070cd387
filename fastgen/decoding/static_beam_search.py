"""Beam search whose steps can be captured and replayed: in place, with no shape or branch that depends on values."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.beam_search import _DEAD, FinishingPolicy, first_state
from fastgen.decoding.device_beam_search import DeviceBeamSearch, of_rows
from fastgen.decoding.search import IsStopped
from fastgen.replay.replayer import Replayer

__phase__ = phases.CHOICE


class StaticBeamSearch(DeviceBeamSearch):
    """Beam search in captured steps, with stopping criteria that depend only on the last token and the length.

    The CPU learns one step late whether the search is done, and how many sentences have finished, so that it need not
    wait for the device: steps after the end leave finished hypotheses as they are.
    """

    counts_late = True

    def __init__(
        self,
        prompt: Tensor,
        beams: int,
        candidates: int,
        policy: FinishingPolicy,
        fill: int,
        replayer: Replayer,
        ends: Tensor | None,
        is_late: bool,
    ) -> None:
        """`ends`: the tokens that end a hypothesis, int64 `[n]`; `is_late`: one step too many does no harm."""
        super().__init__(prompt, beams, candidates, policy, fill)
        device = prompt.device
        self._replayer = replayer
        self._ends = prompt.new_empty(0) if ends is None else ends.to(device)
        self._is_late = is_late
        self._scores: Tensor | None = None
        lengths = range(policy.prompt_length + 1, policy.max_length + 2)
        as_floats = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        self._divisors = as_floats([policy.divisor(length) for length in lengths])
        self._best_divisors = as_floats([policy.best_divisor(length) for length in lengths])
        self._step = torch.zeros(1, dtype=torch.int64, device=device)  # steps taken, `length` less the prompt's
        self._state = torch.tensor([1, 0], device=device)  # int64 [2]: goes on, sentences that have finished
        self._known = Late(self._state)
        self._whole: tuple[Any, ...] | None = None  # from before sentences left, if their steps are kept

    def restore_first_buffers(self) -> None:
        """Return to the tensors of the first step, for as many sentences as then, whatever the tensors contain."""
        if self._whole is not None:
            (self.live, self._first_row, self._request_row, self._scores), self._whole = self._whole, None
        self._replayer.restore_first_buffers()

    def drop_retained(self) -> None:
        """Drop what is kept for later calls: none will go on with this search."""
        self._whole = None
        self._replayer.drop_retained()

    def restart(self, prompt: Tensor, replayer: Replayer) -> None:
        """Begin anew, in place, with other prompts of the same shape; `replayer` takes over the captured steps."""
        self.live.become(first_state(prompt, self.beams, self.policy, self._fill))
        self._begin(self.live)
        self._step.zero_()
        self._known.drop_retained()
        self._state.copy_(self._known.first, non_blocking=True)
        replayer.resume(self._replayer.captured)
        self._replayer = replayer

    takes_logits = False

    def choose(self, log_probs: Tensor, is_stopped: IsStopped, sample: bool = False, is_tied: bool = False) -> Tensor:
        """Do what `BeamSearch.choose` does, with the criteria of `__init__` and without sampling."""
        if self._scores is None or (self._scores.shape, self._scores.dtype) != (log_probs.shape, log_probs.dtype):
            self._scores = torch.empty_like(log_probs)
        self._scores.copy_(log_probs)  # to the address that a captured step reads
        parents: Tensor = self._replayer(self._choose, self._scores, None)
        self.length += 1
        self._known.push()
        self.done = self.length >= self.policy.max_length or not self._known.values(self._is_late)[0]
        return parents

    def finished_mask(self) -> Tensor:
        """Which sentences have finished, none if all have: then the search is done, which the CPU may not know yet."""
        finished_mask = super().finished_mask()
        return finished_mask & ~finished_mask.all()

    def num_finished(self) -> int:
        return self._known.values(late=True)[1]

    def evict(self, leaving: Tensor) -> Tensor:
        self._replayer.shrink()
        if self._replayer.retains_buffers and self._whole is None:
            self._whole = copy.copy(self.live), self._first_row, self._request_row, self._scores
        self._known.drop_retained()
        return super().evict(leaving)

    def _choose(self, log_probs: Tensor) -> Tensor:
        """Do one step, in a way that can be captured; returns the parents' rows, int64 `[B*M]`."""
        live, beams, policy = self.live, self.beams, self.policy
        vocabulary = log_probs.shape[-1]
        totals = (log_probs.view(self.batch, beams, vocabulary) + live.scores[:, :, None]).flatten(1)
        scores, chosen = torch.topk(totals, k=self.candidates)  # [B, K]
        tokens, parents = chosen % vocabulary, chosen // vocabulary
        length = self._step + policy.prompt_length
        stopped = torch.isin(tokens, self._ends) | (length + 1 >= policy.max_length)
        goes_on = self._state[:1] > 0  # bool [1]
        self._finish_all(scores, tokens, parents, stopped, goes_on)

        best_scores, best = torch.topk(scores.add(stopped, alpha=_DEAD), k=beams)  # [B, M]
        live.scores.copy_(best_scores)
        chosen = parents.gather(1, best)
        local = (chosen + self._first_row).flatten()
        for written, new, place in (
            (live.tokens, tokens.gather(1, best), length),
            (live.rows, (chosen + self._request_row).to(live.rows.dtype), self._step),
        ):
            written.copy_(of_rows(written, local))
            written.index_copy_(2, place, new[:, :, None])
        self._step.add_(1)
        best_score = divided(live.scores[:, :1], self._best_divisors.index_select(0, self._step - 1))
        live.improvable.logical_and_(policy.is_improvable(best_score, live.finished_scores, live.is_finished))
        goes_on = goes_on & live.improvable.any()
        if policy.early_stopping is True:
            goes_on = goes_on & ~live.is_finished.all()
        if not self._evicted:
            goes_on = goes_on & ~stopped.all()
        self._state.copy_(torch.stack([goes_on[0].to(torch.int64), self.finished_mask().sum()]))
        return local

    def _finish_all(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor, goes_on: Tensor) -> None:
        """Do what `_finish` does, for every sentence, whether a hypothesis has ended or not."""
        live, policy = self.live, self.policy
        finishing = stopped & self._best
        normalised = divided(scores, self._divisors.index_select(0, self._step))
        finished_scores, best = self._ranked(normalised, finishing)
        best = torch.where(goes_on, best, self._places)
        live.finished_scores.copy_(torch.where(goes_on, finished_scores, live.finished_scores))
        live.is_finished.copy_(torch.cat([live.is_finished, finishing], dim=1).gather(1, best))
        length = self._step + policy.prompt_length
        entered = self._entered(best, tokens, parents, length, self._step)
        for finished, new in zip((live.finished_tokens, live.finished_rows), entered, strict=True):
            finished.copy_(new)


class Late:
    """The values of a small tensor on the CPU: those of a step ago or, after waiting for the device, the latest."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        is_cuda = tensor.is_cuda
        like: dict[str, Any] = dict(dtype=tensor.dtype, device="cpu", pin_memory=is_cuda)
        self._copies = [torch.empty(tensor.shape, **like).copy_(tensor) for _ in "ab"]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in "ab"]
        self._latest = 0
        self.first = self._copies[0].clone()

    def push(self) -> None:
        """Begin to copy the values of this step to the CPU."""
        self._latest = 1 - self._latest
        self._copies[self._latest].copy_(self._tensor, non_blocking=True)
        if (event := self._events[self._latest]) is not None:
            event.record(torch.cuda.current_stream(self._tensor.device))

    def drop_retained(self) -> None:
        """Return to the first values, until the next `push` has arrived."""
        for values, event in zip(self._copies, self._events, strict=True):
            if event is not None:
                event.synchronize()
            values.copy_(self.first)

    def values(self, late: bool) -> list[int]:
        place = 1 - self._latest if late else self._latest
        if (event := self._events[place]) is not None:
            event.synchronize()
        values: list[int] = self._copies[place].tolist()
        return values


def divided(scores: Tensor, divisor: Tensor) -> Tensor:
    """`scores / divisor` as torch divides by a Python number: on CUDA it multiplies by the reciprocal."""
    return scores * divisor.reciprocal() if scores.is_cuda else scores / divisor
