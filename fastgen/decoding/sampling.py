"""Greedy search and sampling with the interface of `BeamSearch`, so that they, too, can join a batch that stays full.

Shapes: `B` live sentences, `M` rows of each (samples), `L` maximal length, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgen.cache.eviction import staying
from fastgen.decoding.beam_search import PerSentence
from fastgen.decoding.search import Hypotheses, IsStopped


class _Rows(PerSentence):
    def __init__(self, prompt: Tensor, samples: int, length: int, fill: int) -> None:
        batch = prompt.shape[0] // samples
        self.tokens = prompt.new_full((batch, samples, length), fill)
        self.tokens[:, :, : prompt.shape[1]] = prompt.unflatten(0, (batch, samples))
        self.scores = torch.zeros(batch, samples, dtype=torch.float32, device=prompt.device)
        self.unfinished = torch.ones(batch, samples, dtype=torch.bool, device=prompt.device)
        self.sentence = torch.arange(batch, device=prompt.device)


class Sampling:
    """Chooses one token for each row and step: the best, or one drawn from the sentence's own random stream.

    So a sentence's samples equal those of `generate` for that sentence alone, after `torch.manual_seed`.
    """

    ranks = False
    counts_late = False
    takes_logits = False

    def __init__(
        self, prompt: Tensor, samples: int, max_length: int, fill: int, seeds: Sequence[int] | None = None
    ) -> None:
        """`prompt`: int64 `[B*M, P]`; `fill`: token after the end; `seeds`: of each sentence; None: greedy."""
        self.beams, self._fill = samples, fill
        self.prompt_length = self.length = prompt.shape[1]
        self.live = _Rows(prompt, samples, max_length, fill)
        self._result = Hypotheses(self.live.tokens.clone(), self.live.tokens, self.live.scores.clone())
        self._streams = None
        if seeds is not None:
            self._streams = [torch.Generator(prompt.device).manual_seed(seed) for seed in seeds]
        self.done = False

    @property
    def batch(self) -> int:
        return self.live.tokens.shape[0]

    def running(self) -> Tensor:
        """The rows so far, int64 `[B*M, length]`."""
        return self.live.tokens[:, :, : self.length].flatten(0, 1)

    def choose(self, scores: Tensor, is_stopped: IsStopped, sample: bool = False, is_tied: bool = False) -> Tensor:
        """Choose the next token of each row by `scores` `[B*M, V]`, logits after the host's logits processors.

        `sample` is ignored: `seeds` decides. Returns the row that each row continues, int64 `[B*M]`: that same row.
        """
        live, shape = self.live, (self.batch, self.beams)
        if self._streams is None:
            tokens = scores.argmax(-1)
        else:
            shares = scores.softmax(-1)
            # On a GPU, drawing from infinite numbers or NaN would end the process.
            if not bool(shares.isfinite().all()):
                raise ValueError("the options leave no probabilities to draw from")
            shares = shares.unflatten(0, shape)
            streams = [self._streams[sentence] for sentence in live.sentence.tolist()]
            drawn = [torch.multinomial(one, 1, generator=stream) for one, stream in zip(shares, streams, strict=True)]
            tokens = torch.cat(drawn).squeeze(1)
        gained = scores.log_softmax(-1).gather(1, tokens[:, None]).view(shape)
        tokens = tokens.view(shape).masked_fill(~live.unfinished, self._fill)
        stopped = is_stopped(tokens, self._continued(tokens))
        live.scores = live.scores + gained.masked_fill(~live.unfinished, 0.0)
        live.tokens[:, :, self.length] = tokens
        live.unfinished = live.unfinished & ~stopped
        self.length += 1
        self.done = not bool(live.unfinished.any())
        return torch.arange(tokens.numel(), device=tokens.device)

    def _continued(self, tokens: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.cat([self.running(), tokens.flatten()[:, None]], dim=1)

    def choose_allowed(self, logits: Tensor, banned: Tensor, is_stopped: IsStopped) -> Tensor | None:
        """None: see `takes_logits`."""
        return None

    def finished_mask(self) -> Tensor:
        """Which sentences have ended in all their rows, bool `[B]`."""
        return ~self.live.unfinished.any(1)

    def num_finished(self) -> int:
        """How many sentences have ended in all their rows."""
        return int(self.finished_mask().sum())

    def evict(self, leaving: Tensor) -> Tensor:
        """Evict the sentences `leaving`, bool `[B]`; returns those that stay, int64 `[B']`."""
        self._store(leaving)
        stay = staying(leaving)
        self.live.select(stay)
        return stay

    def hypotheses(self, row: int) -> tuple[Tensor, Tensor]:
        """Tokens `[M, L]` and scores `[M]`, sums of log-probabilities, of a live sentence that has finished."""
        return self.live.tokens[row], self.live.scores[row]

    def _store(self, which: Tensor) -> None:
        place = self.live.sentence[which]
        self._result.tokens[place], self._result.scores[place] = self.live.tokens[which], self.live.scores[which]

    def result(self) -> Hypotheses:
        """All sentences' rows in the order of the request."""
        self._store(torch.ones(self.batch, dtype=torch.bool, device=self.live.sentence.device))
        return self._result
