"""Diverse beam search: a sentence's beams are in groups, each of which avoids what earlier groups chose in this step.

Vijayakumar et al., "Diverse Beam Search" (2016), https://arxiv.org/abs/1610.02424, section 4 with Hamming diversity.
Each group is a beam search by the rules that transformers had for it up to 4.55: a group is done once as many of its
hypotheses have ended as it has beams and none that goes on can be better; the best of all groups are returned.

Shapes: `B` sentences, `M` beams, `S` beams of a group, `L` tokens so far, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.beam_search import _DEAD
from fastgen.decoding.search import Hypotheses

__phase__ = phases.CHOICE

# Returns the scores `[B*S, V]` of a group's rows, from the number of the group, the rows' tokens `[B*S, L]` and
# log-probabilities `[B*S, V]`, and the tokens that all rows `[B*M]` have chosen in this step: 0 for later groups.
Process = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DiversePolicy:
    """transformers' options of these names; the prompt counts in no length but `max_length`."""

    groups: int
    length_penalty: float
    early_stopping: bool | str  # True, False or "never"
    max_length: int
    prompt_length: int
    ends: tuple[int, ...]  # tokens that end a hypothesis
    pad: int

    def normalised(self, score: float, length: int) -> float:
        """The score of a hypothesis of this length, prompt included, from the sum of the log-probabilities."""
        return float(score / (length - self.prompt_length) ** self.length_penalty)

    def best_length(self, length: int) -> int:
        """The length at which a hypothesis of this length now is assumed to score best."""
        return self.max_length if self.early_stopping == "never" and self.length_penalty > 0 else length


@dataclass(frozen=True)
class _Ended:
    score: float  # length-normalised
    tokens: Tensor  # int64, without the end token
    rows: Tensor  # that chose each token after the prompt, the end token included, int64


class _Group:
    """The best S hypotheses of one group of one sentence that have ended."""

    def __init__(self, size: int, policy: DiversePolicy) -> None:
        self._size, self._policy = size, policy
        self.ended: list[_Ended] = []
        self.is_done = False

    def add(self, hypothesis: _Ended) -> None:
        if len(self.ended) == self._size:
            worst = min(range(self._size), key=lambda place: self.ended[place].score)
            if hypothesis.score <= self.ended[worst].score:
                return
            del self.ended[worst]
        self.ended.append(hypothesis)

    def settle(self, best: float, length: int) -> None:
        """Set `is_done`; `best`: the highest sum of log-probabilities among the candidates, which have this length."""
        if self.is_done or len(self.ended) < self._size:
            return
        policy = self._policy
        attainable = policy.normalised(best, policy.best_length(length))
        worst = min(hypothesis.score for hypothesis in self.ended)
        self.is_done = policy.early_stopping is True or worst >= attainable


class DiverseSearch:
    """Diverse beam search for one request. `choose` takes a step; `done` and `result` say how it ended."""

    def __init__(self, prompt: Tensor, beams: int, policy: DiversePolicy) -> None:
        """`prompt`: int64 `[B*M, prompt_length]`."""
        self.beams, self.policy, self.size = beams, policy, beams // policy.groups
        self._batch = batch = len(prompt) // beams
        self._device = device = prompt.device
        self._tokens = prompt  # [B*M, L]
        self._rows = prompt[:, :0]  # that chose each token, [B*M, L - prompt_length]
        self._scores = torch.full((batch, beams), _DEAD, dtype=torch.float32, device=device)  # sums
        self._scores[:, :: self.size] = 0.0  # all beams of a group are equal at first, and one of them counts
        self._groups = [[_Group(self.size, policy) for _ in range(policy.groups)] for _ in range(batch)]

    def running(self) -> Tensor:
        """The live hypotheses so far, int64 `[B*M, L]`."""
        return self._tokens

    @property
    def done(self) -> bool:
        return all(group.is_done for groups in self._groups for group in groups)

    def choose(self, log_probs: Tensor, process: Process) -> Tensor:
        """Choose the next beams from `log_probs` `[B*M, V]` and return their parents' rows, int64 `[B*M]`.

        What `process` returns is written to `log_probs`.
        """
        rows = torch.arange(len(log_probs), device=self._device).view(self._batch, self.beams)
        chosen, parents = torch.zeros_like(rows), rows.clone()
        for number, groups in enumerate(zip(*self._groups, strict=True)):
            its = slice(number * self.size, (number + 1) * self.size)
            mine = rows[:, its].flatten()
            scores = process(number, self._tokens[mine], log_probs[mine], chosen.flatten())
            log_probs[mine] = scores.to(log_probs.dtype)  # a processor of the user's may change it
            totals = (scores + self._scores[:, its].reshape(-1, 1)).view(self._batch, -1)
            candidates = max(2, 1 + len(self.policy.ends)) * self.size  # so many that S go on even if the others end
            best, place = torch.topk(totals, k=candidates)  # [B, K]
            tokens, parent = place % scores.shape[-1], rows[:, its].gather(1, place // scores.shape[-1])
            was_done = torch.tensor([group.is_done for group in groups], device=self._device)[:, None]
            goes_on = self._end(groups, best, tokens, parent)
            self._scores[:, its] = best.gather(1, goes_on).masked_fill(was_done, 0.0)
            chosen[:, its] = tokens.gather(1, goes_on).masked_fill(was_done, self.policy.pad)
            parents[:, its] = parent.gather(1, goes_on)
        flat = parents.flatten()
        self._tokens = torch.cat([self._tokens[flat], chosen.view(-1, 1)], dim=1)
        self._rows = torch.cat([self._rows[flat], flat[:, None]], dim=1)
        return flat

    def _end(self, groups: Sequence[_Group], best: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Store the candidates of a group that end here, `[B, K]` each, the best first.

        Returns which go on, int64 `[B, S]`.
        """
        goes_on, length = [], self._tokens.shape[1] + 1
        values = zip(groups, best.tolist(), tokens.tolist(), parents.tolist(), strict=True)
        for group, scores, its_tokens, its_parents in values:
            open_ones = [place for place, token in enumerate(its_tokens) if token not in self.policy.ends]
            goes_on.append(open_ones[: self.size])
            if group.is_done:
                continue
            # A candidate worse than the beams that go on does not end; nor one that is not among the best S.
            for place in range(min(self.size, goes_on[-1][-1])):
                if its_tokens[place] in self.policy.ends:
                    row = its_parents[place]
                    path = torch.cat([self._rows[row], self._rows.new_tensor([row])])
                    score = self.policy.normalised(scores[place], length)
                    group.add(_Ended(score, self._tokens[row], path))
            group.settle(scores[0], length)
        return torch.tensor(goes_on, device=self._device)

    def result(self, count: int, limit: int | None = None) -> Hypotheses:
        """The best `count` hypotheses of each sentence, unended ones included where a group is not done.

        Tokens are `[B, count, longest]`, of up to `limit` (by default the maximal length) and filled up with padding.
        """
        ends = self.policy.ends
        found = [self._best(sentence, count) for sentence in range(self._batch)]
        lengths = [len(hypothesis.tokens) for best in found for hypothesis in best]
        width = min(max(lengths) + bool(ends), self.policy.max_length if limit is None else limit)
        tokens = self._tokens.new_full((self._batch, count, width), self.policy.pad)
        rows = torch.full_like(tokens[:, :, self.policy.prompt_length :], -1, dtype=torch.int32)
        each = [[hypothesis.score for hypothesis in best] for best in found]
        scores = torch.tensor(each, dtype=torch.float32, device=self._device)
        for sentence, best in enumerate(found):
            for place, hypothesis in enumerate(best):
                length = len(hypothesis.tokens)
                tokens[sentence, place, :length] = hypothesis.tokens
                rows[sentence, place, : len(hypothesis.rows)] = hypothesis.rows
                if length < width and ends:
                    tokens[sentence, place, length] = ends[0]  # as the host does, whichever end token it was
        return Hypotheses(tokens, rows, scores)

    def _best(self, sentence: int, count: int) -> list[_Ended]:
        for number, group in enumerate(self._groups[sentence]):
            if group.is_done:
                continue
            for beam in range(number * self.size, (number + 1) * self.size):
                row = sentence * self.beams + beam
                score = self.policy.normalised(float(self._scores[sentence, beam]), self._tokens.shape[1])
                group.add(_Ended(score, self._tokens[row], self._rows[row]))
        ended = [hypothesis for group in self._groups[sentence] for hypothesis in group.ended]
        return sorted(ended, key=lambda hypothesis: hypothesis.score)[::-1][:count]
