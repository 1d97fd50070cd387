"""Which tokens of a sentence's best hypothesis are decided while the beam search still runs.

In the end the best hypothesis is the best one that has finished so far, or one that grows out of a live beam. What all
of these begin with, the path to their common ancestor in the tree of beams, is decided: no later step takes it back.

Shapes: `B` live sentences, `M` beams, `K` hypotheses of a sentence, live ones and finished ones, `L` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.beam_search import _DEAD, BeamSearch, FinishingPolicy
from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch

_ROUNDINGS = 100  # as many as may add up, by a wide margin, to what a sum seems to rise by


@dataclass(frozen=True)
class Contenders:
    """The hypotheses of each sentence, from one token on, and which of them may be the best in the end."""

    tokens: Tensor  # int64 [B, K, L]
    lengths: Tensor  # the hypothesis' own tokens among these L, int64 [B, K]
    may_win: Tensor  # bool [B, K]; a live one may win as it is or by what grows out of it
    has_ended: Tensor  # bool [B, K]

    def shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """How many tokens all hypotheses that may win begin with, int64 `[B]`; these tokens, int64 `[B, L]`; and
        whether the winner is known, bool `[B]`: then they are all of the winner's tokens, and behind them is padding.
        """
        first = self.may_win.long().argmax(dim=1)  # [B]
        sentences = torch.arange(len(first), device=first.device)
        reference = self.tokens[sentences, first]
        same = (self.tokens == reference[:, None]) | ~self.may_win[:, :, None]
        count = same.all(1).long().cumprod(1).sum(1)
        shortest = self.lengths.masked_fill(~self.may_win, self.tokens.shape[2]).amin(1)
        is_known = (self.may_win.sum(1) == 1) & self.has_ended[sentences, first]
        return count.minimum(shortest) * self.may_win.any(1), reference, is_known


def of_beam_search(search: BeamSearch, start: int, only_falls: bool) -> Contenders:
    """The hypotheses after a step of transformers' rules, from the token `start` on, which counts the prompt.

    `only_falls`: the sum of a hypothesis' log-probabilities cannot rise as the hypothesis grows.
    """
    live, policy, length = search.live, search.policy, search.length
    best = live.finished_scores[:, :1]
    # Finished hypotheses are in the order of their scores; which of equal ones will be the first, only topk knows.
    may_win = live.is_finished & ~(live.finished_scores < best)
    going_on = _goes_on(search)
    if only_falls:
        has_finished = live.is_finished[:, :1]
        going_on = going_on & ~(has_finished & (_best_possible(live.scores, policy, length) < best))
    ends = (live.finished_rows >= 0).sum(-1) + policy.prompt_length  # [B, M]
    return Contenders(
        tokens=torch.cat([live.tokens[:, :, start:length], live.finished_tokens[:, :, start:length]], dim=1),
        lengths=torch.cat([torch.full_like(ends, length), ends], dim=1) - start,
        may_win=torch.cat([going_on, may_win], dim=1),
        has_ended=torch.cat([torch.zeros_like(may_win), torch.ones_like(may_win)], dim=1),
    )


def _goes_on(search: BeamSearch) -> Tensor:
    """Which live beams the search still lets finish, bool `[B, M]`: all of a sentence, or none."""
    live = search.live
    is_closed = ~live.improvable
    if search.policy.early_stopping is True:
        is_closed = is_closed | live.is_finished.all(1, keepdim=True)
    # What is closed only counts a billion less: that decides against a real hypothesis alone.
    is_closed = is_closed & live.is_finished[:, :1] & (live.finished_scores[:, :1] > 0.1 * _DEAD)
    return ~is_closed.expand_as(live.scores)


def _best_possible(scores: Tensor, policy: FinishingPolicy, length: int) -> Tensor:
    """A bound on the final score of what may grow out of beams with these sums, float32 `[B, M]`."""
    longest = max(length + 1, policy.max_length)
    divisor = policy.divisor(longest if policy.length_penalty > 0 else length + 1)
    return _bound(scores, divisor, longest - length)


def _bound(sums: Tensor, divisor: float, steps: int) -> Tensor:
    """The largest quotient that these sums may reach if they only fall, up to rounding; `divisor`: the most it may be
    divided by, so that a sum below zero comes closest to zero."""
    slack = _ROUNDINGS * torch.finfo(sums.dtype).eps
    highest = torch.where(sums.isneginf(), sums, sums + slack * (sums.abs() + steps))  # -inf plus infinity is no number
    return torch.where(highest > 0, torch.inf, highest / divisor)


def of_fairseq_beam_search(search: FairseqBeamSearch, start: int, only_falls: bool) -> Contenders:
    """The hypotheses after a step of fairseq's rules, from the token `start` on, which counts the first token.

    `only_falls`: see `of_beam_search`.
    """
    state, beams, written = search.state, search.beams, search.step + 1
    is_taken = torch.arange(beams, device=state.count.device) < state.count  # [B, M]
    totals = state.ended_total[:, :beams].masked_fill(~is_taken, -torch.inf)
    best = totals.amax(1, keepdim=True)
    going_on = (state.count < beams).expand_as(state.last)
    if only_falls:  # without a finished one `best` is -inf
        going_on = going_on & ~(_best_possible_of_fairseq(state.last, search.policy, search.step) < best)
    ends = state.ended_at[:, :beams] + 2  # with the first token and the last
    may_win = is_taken & ~(totals < best)
    return Contenders(
        tokens=torch.cat([state.tokens[:, :, start:written], state.ended_tokens[:, :beams, start:written]], dim=1),
        lengths=torch.cat([torch.full_like(ends, written), ends], dim=1) - start,
        may_win=torch.cat([going_on, may_win], dim=1),
        has_ended=torch.cat([torch.zeros_like(may_win), torch.ones_like(may_win)], dim=1),
    )


def _best_possible_of_fairseq(sums: Tensor, policy: CollectingPolicy, step: int) -> Tensor:
    last = max(step, policy.max_length)
    return _bound(sums, policy.divisor(last if policy.length_penalty > 0 else step), last - step + 1)


class DecidedFront:
    """What has been told of the best hypotheses of a batch, in columns of one token for each sentence."""

    def __init__(self, start: int) -> None:
        """`start`: tokens that every hypothesis begins with, which are not told."""
        self.length = start  # tokens of each hypothesis that have been told, with those at the start
        self._told: list[Tensor] = []  # int64 [n, B] each, on the CPU

    def advance(self, contenders: Contenders) -> Tensor:
        """The columns that are decided now and were not before, int64 `[n, B]`, on the CPU.

        `contenders`: from the token `length` on.
        """
        counts, tokens, is_known = contenders.shared()
        # Where the winner is known, padding follows for as long as other sentences go on.
        count = counts.max() if bool(is_known.all()) else counts.masked_fill(is_known, tokens.shape[1]).min()
        columns = tokens[:, : int(count.clamp(min=0))].t().cpu()
        self._told.append(columns)
        self.length += len(columns)
        return columns

    def finish(self, tokens: Tensor) -> Tensor:
        """The columns that are left of the best hypotheses, int64 `[n, B]`, on the CPU.

        `tokens`: the best hypotheses, int64 `[B, L]`, from the first token that is told on.

        Raises:
            ValueError: they do not begin with what has been told. That is so if no beam could go on: see the message.
        """
        columns = tokens.t().cpu()
        told = sum(map(len, self._told))
        if told and not torch.equal(torch.cat(self._told), columns[:told]):
            raise ValueError(
                f"The search ended in no beam after {told} tokens had been streamed: every next token was forbidden, "
                "or length_penalty made all scores infinite. Without streamer the same call returns what there is."
            )
        return columns[told:]
