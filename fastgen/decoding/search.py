"""The interface between a loop and the search that chooses tokens: beam search, greedy search or sampling.

Shapes: `B` live sentences, `M` rows of each (beams, or samples), `V` vocabulary, `L` maximal length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

# Says which candidates stop here, bool `[B, K]`, from their tokens, int64 `[B, K]`, and from a function that returns
# the whole hypotheses, int64 `[B*K, length + 1]`.
IsStopped = Callable[[Tensor, Callable[[], Tensor]], Tensor]


@dataclass
class Hypotheses:
    """The result, best first: tokens int64 `[B, M, L]`, rows that chose them int32 `[B, M, L - prompt]`
    (-1 past the end), scores float32 `[B, M]`."""

    tokens: Tensor
    rows: Tensor
    scores: Tensor


class Search(Protocol):
    """One request's search. Each step calls `choose`; `done` and `result` say how it has ended."""

    beams: int  # M
    length: int  # tokens of each hypothesis so far
    done: bool
    ranks: bool  # several hypotheses of a sentence compete, by sums of log-probabilities
    counts_late: bool  # `num_finished` may be as of the step before

    @property
    def live(self) -> Any:
        """The state of the sentences that still run."""

    @property
    def batch(self) -> int:
        """The number of live sentences, B."""

    @property
    def takes_logits(self) -> bool:
        """Whether `choose_allowed` may do a step, so that it is worth a try."""

    def running(self) -> Tensor:
        """The live hypotheses so far, int64 `[B*M, length]`."""

    def choose(self, scores: Tensor, is_stopped: IsStopped, sample: bool = False, is_tied: bool = False) -> Tensor:
        """Choose the next tokens by `scores`, float32 `[B*M, V]`: log-probabilities if the search `ranks`, else logits.

        Returns the row that each row continues, int64 `[B*M]`.
        """

    def choose_allowed(self, logits: Tensor, banned: Tensor, is_stopped: IsStopped) -> Tensor | None:
        """Do what `choose` does, from logits, float32 `[B*M, V]`, with tokens `banned` in all rows, int64 `[n]`.

        Returns None, and does nothing, if log-probabilities of the whole vocabulary are needed.
        """

    def finished_mask(self) -> Tensor:
        """Which live sentences have finished, so that no step can change their results, bool `[B]`."""

    def num_finished(self) -> int:
        """How many live sentences have finished."""

    def evict(self, leaving: Tensor) -> Tensor:
        """Evict the sentences `leaving`, bool `[B]`; returns those that stay, int64 `[B']`."""

    def hypotheses(self, row: int) -> tuple[Tensor, Tensor]:
        """Tokens `[M, L]` and scores `[M]`, best first, of a live sentence that has finished."""

    def result(self) -> Hypotheses:
        """All sentences' hypotheses, in the order of the request."""
