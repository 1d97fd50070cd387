"""Beam search over batches of sentences with fairseq's rules: a sentence is done once M of its hypotheses have ended.

It works in place, with no shape or branch that depends on values, so that steps can be captured and replayed. Shapes:
`B` live sentences, `M` beams, `L` the maximal length, `V` vocabulary, `N` positions of the encoder output.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.eviction import staying
from fastgen.decoding.beam_search import PerSentence
from fastgen.decoding.device_beam_search import of_rows
from fastgen.decoding.static_beam_search import Late, divided
from fastgen.replay.replayer import Replayer

__phase__ = phases.CHOICE


@dataclass(frozen=True)
class CollectingPolicy:
    """fairseq's `len_penalty`, `normalize_scores` and `max_len`, which leaves out the token that ends a hypothesis."""

    length_penalty: float
    is_normalised: bool
    max_length: int

    def divisor(self, step: int) -> float:
        """The number by which the score of a hypothesis that ends at this step, counted from 0, is divided."""
        return float((step + 1) ** self.length_penalty) if self.is_normalised else 1.0


@dataclass
class _State(PerSentence):
    """State of the live sentences; every tensor begins with `[B]`. Place M of `ended_...` is never read."""

    tokens: Tensor  # running hypotheses, the first token included, int64 [B, M, L + 2]
    scores: Tensor  # sums of log-probabilities up to each token, float32 [B, M, L + 1]
    path: Tensor  # the beam that each token was chosen from, int64 [B, M, L + 1]
    last: Tensor  # sums so far, float32 [B, M]
    ended_tokens: Tensor  # [B, M + 1, L + 2]
    ended_scores: Tensor  # [B, M + 1, L + 1]
    ended_path: Tensor  # [B, M + 1, L + 1]
    ended_total: Tensor  # length-normalised, float32 [B, M + 1]
    ended_at: Tensor  # the step, int64 [B, M + 1]
    count: Tensor  # of ended hypotheses, int64 [B, 1]
    sentence: Tensor  # index in the request, int64 [B]


class FairseqBeamSearch:
    """Beam search for one request. `choose` takes a step; `done` and `result` say how it ended."""

    def __init__(
        self,
        batch: int,
        beams: int,
        policy: CollectingPolicy,
        *,
        start: int,
        end: int,
        pad: int,
        device: torch.device,
        replayer: Replayer | None = None,
    ) -> None:
        """`start`, `end`, `pad`: tokens; `replayer`: captures and replays the search's own steps."""
        self.beams, self.policy, self._end, self._replayer = beams, policy, end, replayer
        self._start, self._pad, self._device = start, pad, device
        self.state = self._first(batch)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # `step` on the device
        self._divisors = self._divisors_in(torch.float32)
        self._candidates = torch.arange(2 * beams, device=device)
        self._counts = torch.tensor([batch, 0], device=device)  # int64 [2]: sentences not done, and done
        self._known = Late(self._counts)
        self._begin()
        self._number_rows()
        self._whole: tuple[_State, Tensor] | None = None  # the state before sentences left, if its steps are kept

    def _first(self, batch: int) -> _State:
        """The state before the first step."""
        beams, length, device = self.beams, self.policy.max_length, self._device
        tokens = torch.full((batch, beams, length + 2), self._pad, device=device)
        tokens[:, :, 0] = self._start
        scores = torch.zeros(batch, beams, length + 1, dtype=torch.float32, device=device)
        path = torch.zeros(batch, beams, length + 1, dtype=torch.int64, device=device)
        return _State(
            tokens=tokens,
            scores=scores,
            path=path,
            last=torch.zeros(batch, beams, dtype=torch.float32, device=device),
            ended_tokens=tokens[:, :1].repeat(1, beams + 1, 1),
            ended_scores=scores[:, :1].repeat(1, beams + 1, 1),
            ended_path=path[:, :1].repeat(1, beams + 1, 1),
            ended_total=torch.zeros(batch, beams + 1, dtype=torch.float32, device=device),
            ended_at=torch.full((batch, beams + 1), -1, device=device),
            count=torch.zeros(batch, 1, dtype=torch.int64, device=device),
            sentence=torch.arange(batch, device=device),
        )

    def _begin(self) -> None:
        self.step = 0  # the next one
        self.done = False
        self._attention: Tensor | None = None  # of each step, float32 [L + 1, B, M, N]
        self._results: list[list[dict[str, Any]]] = [[] for _ in range(self.batch)]

    def restore_first_buffers(self) -> None:
        """Return to the tensors of the first step, for as many sentences as then, whatever the tensors contain."""
        if self._whole is not None:
            (self.state, self._first_row), self._whole = self._whole, None
        self._attention, self._results = None, []  # the finished call keeps them
        if self._replayer is not None:
            self._replayer.restore_first_buffers()

    def drop_retained(self) -> None:
        """Drop what is kept for later calls: none will go on with this search."""
        self._whole = None
        if self._replayer is not None:
            self._replayer.drop_retained()

    def restart(self, replayer: Replayer) -> None:
        """Begin anew, in place, with as many sentences; `replayer` takes over the steps captured so far."""
        self.state.become(self._first(self.batch))
        self._begin()
        self._at.zero_()
        self._known.drop_retained()
        self._counts.copy_(self._known.first, non_blocking=True)
        if self._replayer is not None:
            replayer.resume(self._replayer.captured)
        self._replayer = replayer

    @property
    def batch(self) -> int:
        return self.state.tokens.shape[0]

    def _number_rows(self) -> None:
        self._first_row = torch.arange(self.batch, device=self._at.device)[:, None] * self.beams

    def running(self) -> Tensor:
        """The live hypotheses so far, int64 `[B*M, step + 1]`."""
        return self.state.tokens[:, :, : self.step + 1].flatten(0, 1)

    def written(self) -> Tensor:
        """The tokens so far, with room for those to come, int64 `[B*M, L + 2]`."""
        return self.state.tokens.flatten(0, 1)

    def level(self, sentences: Tensor) -> None:
        """Replace all beams of the sentences `sentences`, bool `[B]`, by the sentence's first beam."""
        state, some = self.state, sentences[:, None, None]
        for tensor in (state.tokens, state.scores, state.last[:, :, None]):
            tensor.copy_(torch.where(some, tensor[:, :1], tensor))

    def choose(self, log_probs: Tensor, attention: Tensor | None = None) -> Tensor:
        """Choose the next beams from `log_probs`, float32 `[B*M, V]`, and return their parents' rows, int64 `[B*M]`.

        `attention`: this step's cross-attention weights, `[B*M, N]`, for the result.
        """
        if attention is not None:
            self._note(attention)
        if self.step == 0:  # all beams are equal
            self._turn_to(log_probs.dtype)
            parents = self._of_the_first(log_probs.unflatten(0, (self.batch, self.beams))[:, 0])
        elif self._replayer is None:
            parents = self._of_all(log_probs)
        else:
            parents = self._replayer(self._of_all, log_probs, None)
        self.step += 1
        self._known.push()
        # Where the CPU learns a step late that the search is done, one step more is taken, in which nothing changes.
        is_late = self._replayer is not None and self._replayer.waits_for_nothing
        self.done = self.step > self.policy.max_length or not self._known.values(is_late)[0]
        return parents

    def _turn_to(self, dtype: torch.dtype) -> None:
        """Keep scores in `dtype`, the dtype of the log-probabilities."""
        state = self.state
        if state.last.dtype == dtype:
            return
        for name, tensor in vars(state).items():
            if tensor.is_floating_point():
                setattr(state, name, tensor.to(dtype))
        # The dtype in which torch divides.
        self._divisors = self._divisors_in(torch.float64 if dtype == torch.float64 else torch.float32)

    def _divisors_in(self, dtype: torch.dtype) -> Tensor:
        divisors = [self.policy.divisor(step) for step in range(self.policy.max_length + 1)]
        return torch.tensor(divisors, dtype=dtype, device=self._device)

    def _note(self, attention: Tensor) -> None:
        if self._attention is None:
            shape = (self.policy.max_length + 1, self.batch, self.beams, attention.shape[1])
            self._attention = self.state.last.new_empty(shape)
        self._attention[self.step].copy_(attention.unflatten(0, (self.batch, self.beams)))

    def _of_the_first(self, log_probs: Tensor) -> Tensor:
        scores, tokens = torch.topk(log_probs, k=2 * self.beams)  # [B, 2M]
        return self._take(scores, tokens, torch.zeros_like(tokens))

    def _of_all(self, log_probs: Tensor) -> Tensor:
        vocabulary = log_probs.shape[-1]
        totals = log_probs.unflatten(0, (self.batch, self.beams)) + self.state.last[:, :, None]
        scores, chosen = torch.topk(totals.flatten(1), k=2 * self.beams)  # [B, 2M]
        return self._take(scores, chosen % vocabulary, chosen // vocabulary)

    def _take(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Go on with the best M of the candidates, `[B, 2M]` each, that have not ended; returns their parents' rows."""
        state, beams = self.state, self.beams
        has_ended = tokens.eq(self._end) & scores.ne(-math.inf)
        # Beyond the best M, candidates only keep the beam full.
        self._collect(has_ended[:, :beams], scores[:, :beams], parents[:, :beams])
        # The first M that go on. There are so many: each beam ends at most once a step. (The host's loop also keeps
        # account of beams that are left over otherwise, for searches that end a beam more often.)
        best = torch.topk(has_ended * (2 * beams) + self._candidates, k=beams, largest=False).indices
        parents, scores = parents.gather(1, best), scores.gather(1, best)
        rows = (parents + self._first_row).flatten()
        for written, new, place in (
            (state.tokens, tokens.gather(1, best), self._at + 1),
            (state.scores, scores, self._at),
            (state.path, parents, self._at),
        ):
            written.copy_(of_rows(written, rows))
            written.index_copy_(2, place, new[:, :, None])
        state.last.copy_(scores)
        self._at.add_(1)
        finished_mask = self.finished_mask().sum()
        self._counts.copy_(torch.stack([self.batch - finished_mask, finished_mask]))
        return rows

    def _collect(self, ending: Tensor, scores: Tensor, parents: Tensor) -> None:
        """Store the candidates that end here, `[B, M]` each, as long as their sentence has fewer than M hypotheses."""
        state, beams = self.state, self.beams
        place = state.count + ending.cumsum(1) - 1
        place = torch.where(ending & (place < beams), place, beams)
        rows = (parents + self._first_row).flatten()
        for running, ended, new, at in (
            (state.tokens, state.ended_tokens, torch.full_like(parents, self._end), self._at + 1),
            (state.scores, state.ended_scores, scores, self._at),
            (state.path, state.ended_path, parents, self._at),
        ):
            entering = of_rows(running, rows)
            entering.index_copy_(2, at, new[:, :, None])
            ended.scatter_(1, place[:, :, None].expand_as(entering), entering)
        totals = divided(scores, self._divisors.index_select(0, self._at)).to(scores.dtype)
        state.ended_total.scatter_(1, place, totals)
        state.ended_at.scatter_(1, place, self._at.expand_as(place))
        state.count.add_(ending.sum(1, keepdim=True)).clamp_(max=beams)

    def finished_mask(self) -> Tensor:
        """Which sentences' hypotheses have all ended, bool `[B]`."""
        return self.state.count[:, 0] >= self.beams

    def num_finished(self) -> int:
        """How many sentences have finished, perhaps as of a step ago."""
        return self._known.values(self._replayer is not None)[1]

    def evict(self, leaving: Tensor) -> Tensor:
        """Evict the sentences `leaving`, bool `[B]`, unless they are all; returns those that stay, int64 `[B']`."""
        # If they are all, the search is done, though the CPU may not know yet.
        leaving = leaving & ~leaving.all()
        self._store(torch.nonzero(leaving)[:, 0])
        stay = staying(leaving)
        if self._replayer is not None:
            self._replayer.shrink()
            if self._replayer.retains_buffers and self._whole is None:
                self._whole = copy.copy(self.state), self._first_row
        self.state.select(stay)
        if self._attention is not None:
            self._attention = self._attention.index_select(1, stay)
        self._number_rows()
        self._counts.copy_(torch.tensor([len(stay), 0], device="cpu"))
        self._known.drop_retained()
        return stay

    def result(self) -> list[list[dict[str, Any]]]:
        """For each sentence of the request its hypotheses as fairseq returns them, the best first.

        Raises:
            AssertionError: like fairseq's loop, if a sentence has reached the maximal length and nothing can end there.
        """
        self._store(torch.arange(self.batch, device=self._at.device))
        return self._results

    def _store(self, sentences: Tensor) -> None:
        ended = copy.copy(self.state)
        ended.select(sentences)  # a copy, which later calls don't write to
        attention = None if self._attention is None else self._attention.index_select(1, sentences)
        # Of all hypotheses at once: on a GPU each operation on one of them would be a kernel.
        positional = ended.ended_scores.clone()
        positional[:, :, 1:] -= ended.ended_scores[:, :, :-1]
        totals, counts, last_steps = ended.ended_total.tolist(), ended.count[:, 0].tolist(), ended.ended_at.tolist()
        for i, number in enumerate(ended.sentence.tolist()):
            count, length = counts[i], self.policy.max_length
            assert count == self.beams or length in last_steps[i][:count], f"{length} < {length}"
            _, order = torch.sort(torch.tensor(totals[i][:count], device="cpu"), descending=True)
            self._results[number] = [
                _hypothesis(ended, i, place, last_steps[i][place] + 1, positional, attention)
                for place in order.tolist()
            ]


def _hypothesis(
    state: _State, sentence: int, place: int, length: int, positional: Tensor, attention: Tensor | None
) -> dict[str, Any]:
    """A hypothesis as fairseq returns it.

    Args:
        length: the end token included.
        positional: each token's own score, `[B, M, L]`; attention: `[L + 1, B, M, N]`.
    """
    its = torch.empty(0, device=None)  # where the host makes it: on torch's default device
    if attention is not None:
        path = state.ended_path[sentence, place, :length]
        its = attention[torch.arange(length, device=path.device), sentence, path].t()  # [N, length]
    return {
        "tokens": state.ended_tokens[sentence, place, 1 : length + 1],
        "score": state.ended_total[sentence, place],
        "attention": its,
        "alignment": torch.empty(0, device=None),
        "positional_scores": positional[sentence, place, :length],
    }
