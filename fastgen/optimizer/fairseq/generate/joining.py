"""One sample's search in a batch of several: the host's loop, suspended at every step that the samples share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastgen.optimizer.fairseq.generate.shortlist import Shortlist
from fastgen.optimizer.fairseq.model.decoder import StandIn
from fastgen.optimizer.fairseq.request import Request
from fastgen.optimizer.suspending import Suspendable

_local = threading.local()


def source_of(sample: dict[str, Any]) -> Tensor:
    """The encoder's input in a sample, `[B, N, ...]`."""
    source = Request(None, sample, None, None, None).source
    assert source is not None
    return source


@dataclass
class Step:
    """The inputs of one model step that a search asks for."""

    tokens: Tensor  # int64 [B*M, length], the hypotheses so far
    encoder_out: dict[str, list[Tensor]]
    parents: Tensor | None  # int64 [B*M], the rows of the previous step that the hypotheses continue; None at first
    temperature: float


class Part(Suspendable):
    """One sample's search, which runs in a thread of its own."""

    request: Request
    step: Step

    def __init__(self, infer: Callable[[dict[str, Any]], list[Any]], number: int, sample: dict[str, Any]) -> None:
        super().__init__(lambda: self._infer(infer, sample))
        self.number = number
        # Sentences in the joint tree, or to be added; positions of the source, later of the encoder output.
        self.sentences, self.width = source_of(sample).shape[:2]

    def _infer(self, infer: Callable[[dict[str, Any]], list[Any]], sample: dict[str, Any]) -> list[Any]:
        _local.part = self
        return infer(sample)

    def proceed(self, answer: tuple[Tensor, Tensor | None] | None) -> None:
        """Give the search the scores of the step, and run it to the next step or the end."""
        step = self.resume(answer)
        if not self.ended:
            self.step = step


def joining() -> Part | None:
    """The part whose search begins now in this thread; each part is returned only once."""
    part: Part | None = getattr(_local, "part", None)
    _local.part = None
    return part


class JoiningEnsemble(StandIn):
    """Replaces the generator's `model` in one part's search, and passes each step on to the joint tree."""

    def __init__(self, request: Request, part: Part, shortlist: Shortlist | None) -> None:
        super().__init__(request, shortlist)
        self._part = part
        self._parents: Tensor | None = None
        part.request = request

    def reorder_incremental_state(self, incremental_states: Any, new_order: Tensor) -> None:
        if self.reason:
            self.inner.reorder_incremental_state(incremental_states, new_order)
        self._parents = new_order

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        if self.reason:
            return self.inner.forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        scores, weights = self._part.ask(Step(tokens, encoder_outs[0], self._parents, temperature))
        return scores if self.shortlist is None else self.shortlist.of(tokens, scores), weights
