"""Beam search over batches of sentences, with the rules of transformers' vectorised beam search.

Shapes: `B` live sentences, `M` beams, `K` candidates a sentence and step, `L` maximal length, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache.eviction import staying
from fastgen.decoding import sparse_topk
from fastgen.decoding.search import Hypotheses, IsStopped
from fastgen.memory.buffers import Buffers

__phase__ = phases.CHOICE

_DEAD = -1.0e9  # the host's mark of a beam that must not be chosen


@dataclass(frozen=True)
class FinishingPolicy:
    """When a hypothesis counts as finished and a sentence as done (transformers' rules)."""

    length_penalty: float
    early_stopping: bool | str  # True, False or "never"
    max_length: int
    prompt_length: int
    sorts_drawn: bool = False  # sampled candidates compete in the order of their scores, not in the order of the draw

    def divisor(self, length: int) -> float:
        """The number by which the score of a hypothesis of this length, prompt included, is divided."""
        return float((length - self.prompt_length) ** self.length_penalty)

    def best_divisor(self, length: int) -> float:
        """The number by which the best score that a hypothesis of this length may still reach is divided."""
        by_maximum = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.divisor(self.max_length if by_maximum else length)

    def is_improvable(self, best: Tensor, finished: Tensor, is_finished: Tensor) -> Tensor:
        """Whether the best live beam, of score `[B, 1]`, may still beat the worst finished one, bool `[B, 1]`."""
        worst = torch.where(is_finished, finished.min(dim=1, keepdim=True)[0], _DEAD)
        return torch.any(best > worst, dim=-1, keepdim=True)


class PerSentence:
    """Base of classes whose attributes are all tensors, with sentences as the first dimension."""

    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these, int64 `[B']`."""
        for name, tensor in vars(self).items():
            setattr(self, name, tensor.index_select(0, sentences))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    def become(self, other: PerSentence) -> None:
        """Copy the values of `other`, in place."""
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))


@dataclass
class _Live(PerSentence):
    """State of the sentences that still run; every tensor begins with `[B, M]` or `[B]`."""

    tokens: Tensor  # running hypotheses, int64 [B, M, L]
    rows: Tensor  # batch rows that wrote them, int32 [B, M, L - prompt]
    scores: Tensor  # sums of log-probabilities, float32 [B, M]
    finished_tokens: Tensor
    finished_rows: Tensor
    finished_scores: Tensor  # length-normalised
    is_finished: Tensor  # bool [B, M]
    improvable: Tensor  # bool [B, 1]
    sentence: Tensor  # index in the request, int64 [B]


def first_state(prompt: Tensor, beams: int, policy: FinishingPolicy, fill: int) -> _Live:
    """The state before the first step; arguments as of `BeamSearch`."""
    device, batch = prompt.device, prompt.shape[0] // beams
    tokens = torch.full((batch, beams, policy.max_length), fill, dtype=torch.int64, device=device)
    tokens[:, :, : policy.prompt_length] = prompt.unflatten(0, (batch, beams))
    steps = max(policy.max_length - policy.prompt_length, 0)
    rows = torch.full((batch, beams, steps), -1, dtype=torch.int32, device=device)
    # Only the first beam counts at first, or all beams would choose the same tokens.
    scores = torch.zeros(batch, beams, dtype=torch.float32, device=device)
    scores[:, 1:] = _DEAD
    return _Live(
        tokens=tokens,
        rows=rows,
        scores=scores,
        finished_tokens=tokens.clone(),
        finished_rows=rows.clone(),
        finished_scores=torch.full_like(scores, _DEAD),
        is_finished=torch.zeros(batch, beams, dtype=torch.bool, device=device),
        improvable=torch.ones(batch, 1, dtype=torch.bool, device=device),
        sentence=torch.arange(batch, device=device),
    )


class BeamSearch:
    """Beam search for one request; implements `Search`."""

    ranks = True
    counts_late = False
    shows_rows = False  # `running` goes to code of the user's, which may keep it, or change a row as in the host

    def __init__(
        self,
        prompt: Tensor,
        beams: int,
        candidates: int,
        policy: FinishingPolicy,
        fill: int,
        buffers: Buffers | None = None,
    ) -> None:
        """`prompt`: int64 `[B*M, prompt_length]`; `candidates`: K; `fill`: token after the end; `buffers`: where large
        buffers come from."""
        self._buffers = Buffers(None) if buffers is None else buffers
        self.beams, self.candidates, self.policy, self._fill = beams, candidates, policy, fill
        self._begin(first_state(prompt, beams, policy, fill))
        self._totals: Tensor | None = None
        self._best = torch.arange(candidates, device=prompt.device) < beams  # bool [K]
        self._places = torch.arange(beams, device=prompt.device)
        self._number_rows()

    def _begin(self, live: _Live) -> None:
        self.live = live
        self.length = self.policy.prompt_length
        self.done = self._evicted = False
        self._result = Hypotheses(live.tokens.clone(), live.rows.clone(), live.finished_scores.clone())

    @property
    def batch(self) -> int:
        return self.live.tokens.shape[0]

    def _number_rows(self) -> None:
        """Set the first row of each live sentence, int64 `[B, 1]`, counted over live sentences and over the request."""
        sentence = self.live.sentence
        self._first_row = torch.arange(len(sentence), device=sentence.device)[:, None] * self.beams
        self._request_row = sentence[:, None] * self.beams

    def running(self) -> Tensor:
        """The live hypotheses so far, int64 `[B*M, length]`."""
        return self.live.tokens[:, :, : self.length].flatten(0, 1)

    @property
    def takes_logits(self) -> bool:
        """Whether `choose_allowed` may do a step, so that it is worth a try."""
        from fastgen import ops

        return ops.is_native(self.live.scores.device)

    def choose(self, log_probs: Tensor, is_stopped: IsStopped, sample: bool = False, is_tied: bool = False) -> Tensor:
        """Choose the next beams from `log_probs` `[B*M, V]` and return their parents' rows, int64 `[B*M]`.

        `is_stopped(tokens, hypotheses)` says which of the candidates stop here: `tokens` int64 `[B, K]`,
        `hypotheses()` int64 `[B*K, length + 1]`, result bool `[B, K]`. `is_tied`: `choose_allowed` has found ties.
        """
        vocabulary = log_probs.shape[-1]
        if not (sample or is_tied) and (found := self._candidates_by_row(log_probs)) is not None:
            return self._take(*found, is_stopped)
        log_probs = log_probs.view(self.batch, self.beams, vocabulary)
        room = self._buffer(log_probs)
        totals = torch.add(log_probs, self.live.scores[:, :, None], out=room).flatten(1)  # [B, M*V]
        if sample:
            chosen = torch.multinomial(totals.softmax(-1), num_samples=self.candidates)
            scores = totals.gather(1, chosen)
            if self.policy.sorts_drawn:
                scores, order = scores.sort(dim=1, descending=True)
                chosen = chosen.gather(1, order)
        else:
            scores, chosen = torch.topk(totals, k=self.candidates)
        return self._take(scores, chosen % vocabulary, chosen // vocabulary, is_stopped)

    def choose_allowed(self, logits: Tensor, banned: Tensor, is_stopped: IsStopped) -> Tensor | None:
        """Do what `choose` does, from `logits` `[B*M, V]`, float32, with `banned` tokens, int64 `[n]`, in all rows.

        Returns None, and does nothing, if log-probabilities of the whole vocabulary are needed.
        """
        found = self._candidates_by_row(logits, banned, are_logits=True)
        return None if found is None else self._take(*found, is_stopped)

    def may_choose_among(self, vocabulary: int) -> bool:
        """Whether `choose_among` can choose exactly what `choose` does, with so many tokens."""
        return sparse_topk.may_do(self.candidates, self.beams * vocabulary, self.live.scores.device)

    def choose_among(
        self, values: Tensor, rows: Tensor, tokens: Tensor, vocabulary: int, is_stopped: IsStopped, least: float
    ) -> Tensor | None:
        """Do what `choose` does where all log-probabilities are -inf but for some.

        Args:
            values: their log-probabilities, `[E]`.
            rows, tokens: where they are, int64 `[E]` each, sorted by row and, within a row, by token.
            vocabulary: V.
            least: None is returned, and nothing done, if a candidate has no better sum than this.
        """
        places = rows % self.beams * vocabulary + tokens
        totals = values + self.live.scores.flatten().index_select(0, rows)
        found = sparse_topk.sparse_topk(totals, rows // self.beams, places, self.batch, self.candidates)
        scores, chosen, _ = found  # [B, K]
        if least > -torch.inf and not bool((scores > least).all()):
            return None
        return self._take(scores, chosen % vocabulary, chosen // vocabulary, is_stopped)

    def _candidates_by_row(
        self, scores: Tensor, banned: Tensor | None = None, are_logits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Scores, tokens and parents of the K candidates, `[B, K]` each: a sentence's best K are among the best of each
        row, which the native operator finds in one pass.

        `scores` `[B*M, V]`: log-probabilities, or logits if they `are_logits`.

        Returns None if there is no such operator, or if scores are equal and `torch.topk` has to order them.
        """
        from fastgen import ops

        if not may_find_by_row(scores, self.live.scores, self.candidates):
            return None
        best, tokens, parents, is_clear = ops.beam_candidates(
            scores, self.live.scores, self.candidates, banned, not are_logits
        )
        return (best, tokens, parents) if bool(is_clear) else None

    def _take(self, scores: Tensor, tokens: Tensor, parents: Tensor, is_stopped: IsStopped) -> Tensor:
        """Go on with the best M of the candidates, `[B, K]` each, the best first; returns their parents' rows."""

        shown: list[Tensor] = []

        def hypotheses() -> Tensor:
            so_far = self.running().index_select(0, (parents + self._first_row).flatten())
            shown.append(torch.cat([so_far, tokens.flatten()[:, None]], dim=1))
            return shown[0]

        stopped = is_stopped(tokens, hypotheses)
        if self.shows_rows:
            self.live.tokens = self.live.tokens.clone()  # the old ones are no longer written to
            if shown:
                tokens = shown[0][:, -1].view_as(tokens)  # a criterion may have put others there
        return self._advance(scores, tokens, parents, stopped)

    def _advance(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor) -> Tensor:
        """Do what `_take` does once it is known which of the candidates stop here, bool `[B, K]`."""
        live = self.live
        self._finish(scores, tokens, parents, stopped)
        # The next beams are the best candidates that go on.
        live.scores, best = torch.topk(scores.add(stopped, alpha=_DEAD), k=self.beams)  # [B, M]
        chosen = parents.gather(1, best)
        local = (chosen + self._first_row).flatten()
        self._reorder(local)
        live.tokens[:, :, self.length] = tokens.gather(1, best)
        live.rows[:, :, self.length - self.policy.prompt_length] = chosen + self._request_row
        self.length += 1

        best_score = live.scores[:, :1] / self.policy.best_divisor(self.length)
        improvable = self.policy.is_improvable(best_score, live.finished_scores, live.is_finished)
        live.improvable = live.improvable & improvable
        self.done = self._is_done(stopped)
        return local

    def _reorder(self, rows: Tensor) -> None:
        """Let the beams go on from these rows, int64 `[B*M]`, counted over the batch."""
        shape = self.batch, self.beams
        step = self.length - self.policy.prompt_length
        # Tokens and rows are reordered side by side.
        for written in (self.live.tokens[:, :, : self.length], self.live.rows[:, :, :step]):
            written.copy_(written.flatten(0, 1).index_select(0, rows).unflatten(0, shape))

    def _buffer(self, like: Tensor) -> Tensor | None:
        """Room for `[B, M, V]`, the same at every step: fresh memory of this size costs page faults on a CPU."""
        if like.dtype != self.live.scores.dtype:
            return None  # a logits processor has changed the dtype: torch chooses the sum's dtype
        if self._totals is None or self._totals.dtype != like.dtype:
            self._totals = self._buffers.empty(like.shape, like.dtype, like.device)
        return self._totals[: like.shape[0]]

    def _finish(self, scores: Tensor, tokens: Tensor, parents: Tensor, stopped: Tensor) -> None:
        """Let the candidates that stopped here compete with the hypotheses finished before."""
        live, policy = self.live, self.policy
        finishing = stopped & self._best  # beyond the best M, candidates only keep the beam full
        finished_scores, best = self._ranked(scores / policy.divisor(self.length + 1), finishing)
        if torch.equal(best, self._places.expand_as(best)):
            return  # nothing new
        live.finished_scores = finished_scores
        live.is_finished = torch.cat([live.is_finished, finishing], dim=1).gather(1, best)

        # Build only the hypotheses that enter: [new], each with the sentence, the place and the candidate.
        length, step = self.length, self.length - policy.prompt_length
        old = (best.clamp(max=self.beams - 1) + self._first_row).flatten()
        live.finished_tokens = live.finished_tokens.flatten(0, 1).index_select(0, old).view_as(live.tokens)
        live.finished_rows = live.finished_rows.flatten(0, 1).index_select(0, old).view_as(live.rows)
        sentence, place = torch.nonzero(best >= self.beams, as_tuple=True)
        candidate = best[sentence, place] - self.beams
        parent = parents[sentence, candidate]
        new_tokens, new_rows = live.tokens[sentence, parent], live.rows[sentence, parent]
        new_tokens[:, length] = tokens[sentence, candidate]
        new_rows[:, step] = parent + self._request_row[sentence, 0]
        live.finished_tokens[sentence, place] = new_tokens
        live.finished_rows[sentence, place] = new_rows

    def _ranked(self, normalised: Tensor, finishing: Tensor) -> tuple[Tensor, Tensor]:
        """The best M of the finished hypotheses and the candidates, by score: scores and places among both, `[B, M]`.

        `normalised`: the candidates' scores `[B, K]`, written to; `finishing`: which of them end, bool `[B, K]`.
        """
        live = self.live
        # One after the other, as the host adds them: near -1e9 float32 rounds to multiples of 64.
        if self.policy.early_stopping is True:
            normalised.add_(torch.all(live.is_finished, dim=-1, keepdim=True), alpha=_DEAD)
        normalised.add_(~live.improvable, alpha=_DEAD)
        normalised.add_(~finishing, alpha=_DEAD)
        scores, places = torch.topk(torch.cat([live.finished_scores, normalised], dim=1), k=self.beams)  # of M + K
        return scores, places

    def _is_done(self, stopped: Tensor) -> bool:
        return not bool(self._goes_on(stopped))

    def _goes_on(self, stopped: Tensor) -> Tensor:
        """Whether there is another step, bool; `stopped`: which candidates stop here, bool `[B, K]`."""
        live = self.live
        go_on = torch.any(live.improvable)
        if self.policy.early_stopping is True:
            go_on = go_on & ~torch.all(live.is_finished)
        # The host ends once all candidates stop. Those of evicted sentences are not computed, and might go on; only
        # the maximal length is known to stop them all.
        if not self._evicted or self.length >= self.policy.max_length:
            go_on = go_on & ~torch.all(stopped)
        return go_on

    def finished_mask(self) -> Tensor:
        """Which sentences have finished: no step can change their results; bool `[B]`. Not called once `done`.

        A sentence has finished when its M places hold finished hypotheses with real scores and, by the
        policy, nothing new is accepted: every later candidate is worth less than -1e9.
        """
        live = self.live
        real = torch.all(live.is_finished & (live.finished_scores > 0.1 * _DEAD), dim=1)
        return real if self.policy.early_stopping is True else real & ~live.improvable[:, 0]

    def num_finished(self) -> int:
        """How many sentences have finished."""
        return int(self.finished_mask().sum())

    def evict(self, leaving: Tensor) -> Tensor:
        """Evict the sentences `leaving`, bool `[B]`; returns those that stay, int64 `[B']`."""
        self._store(leaving)
        stay = staying(leaving)
        self.live.select(stay)
        self._number_rows()
        self._evicted = True
        return stay

    def hypotheses(self, row: int) -> tuple[Tensor, Tensor]:
        """Tokens `[M, L]` and scores `[M]`, best first, of a live sentence that has finished."""
        return self.live.finished_tokens[row], self.live.finished_scores[row]

    def _store(self, which: Tensor) -> None:
        live = self.live
        place = live.sentence[which]
        self._result.tokens[place] = live.finished_tokens[which]
        self._result.rows[place] = live.finished_rows[which]
        # A logits processor may have changed the dtype of the scores.
        self._result.scores = self._result.scores.to(live.finished_scores.dtype)
        self._result.scores[place] = live.finished_scores[which]

    def result(self) -> Hypotheses:
        """All sentences' hypotheses in the order of the request."""
        self._store(torch.ones(self.batch, dtype=torch.bool, device=self.live.sentence.device))
        return self._result


def may_find_by_row(scores: Tensor, so_far: Tensor, candidates: int) -> bool:
    """Whether a sentence's candidates can be found among the best of each row of `scores`, `[B*M, V]`.

    `so_far`: the beams' scores, whose dtype a logits processor may have changed.
    """
    from fastgen import ops  # loads or even compiles the operators, so not before they are needed

    return (
        scores.dtype == so_far.dtype == torch.float32 and scores.shape[-1] > candidates and ops.is_native(scores.device)
    )
