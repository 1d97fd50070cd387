"""One call of `generate` among several that are decoded together, suspended at each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding import front
from fastgen.decoding.beam_search import BeamSearch
from fastgen.decoding.search import Search
from fastgen.memory import limits
from fastgen.optimizer.transformers import dispatch, interception
from fastgen.optimizer.transformers.cache import planning, prefixes, slim
from fastgen.optimizer.transformers.generate import beam_search
from fastgen.optimizer.transformers.generate.shareable import why_not_shared
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.request import Request

CachesByModule = Mapping[torch.nn.Module, slim.LayerCaches] | None


class PlannedCaches:
    """Which caches all calls have, which are to be together: what the first one says."""

    layer_caches: CachesByModule = None
    plan: str | None = None  # what speaks against others

    def of(self, request: Request, stock: Callable[..., Any]) -> CachesByModule:
        if self.layer_caches is None:
            caches = planning.fixed_for(request, stock)
            self.layer_caches, self.plan = caches.layer_caches, caches.plan
        return self.layer_caches


class Found(NamedTuple):
    """What a sentence ends with, best first."""

    sentence: int  # of the call
    tokens: Tensor  # int64 [num_return_sequences, L], the prompt of a decoder-only model among them
    scores: Tensor  # [num_return_sequences]


class Decided(NamedTuple):
    """What is decided of a sentence that is still here."""

    tokens: Tensor  # int64 [rows, length], the prompt among them: all rows, or what the best one of beams begins with
    scores: list[float | None]  # of the rows that have ended, which are filled up behind their end


class Call:
    """One call of `generate`, suspended at each of its steps."""

    request: Request
    decoder: CallDecoder

    def __init__(self, number: int, tokens: bool = False) -> None:
        """See `ContinuousBatch.admit`."""
        self.number, self._tokens = number, tokens
        self.result: Any = None
        self.ended = False
        self.error: Exception | None = None  # which ended it, if it `fails_alone`: else it is raised
        self.found: list[Found] = []  # of sentences that have finished since the caller took the last ones

    def generate(
        self, model: Any, planned: PlannedCaches, kwargs: Mapping[str, Any], seeds: Sequence[int] | None
    ) -> None:
        """Begin `model.generate(**kwargs)`; it has ended if it can't be decoded with others."""
        try:
            with interception.intercepting():
                self.result, self.ended = model.generate(**kwargs), True
            return
        except interception.Intercepted as intercepted:
            self.request, stock = intercepted.request, intercepted.stock
        self.request.seeds = seeds if self.request.generation_config.do_sample else None
        self._start(planned, stock)  # outside: what it raises has nothing to do with the interception

    @limits.relief()
    @torch.no_grad()
    def _start(self, planned: PlannedCaches, stock: Callable[..., Any]) -> None:
        if why_not_shared(self.request, stock, self._tokens):
            self.result, self.ended = dispatch.run(self.request, stock), True
            return
        self.decoder = CallDecoder(self.request, planned.of(self.request, stock), self.found if self._tokens else None)
        self.decoder.prefixes = prefixes.begun(self.request, self.decoder.cache)
        self.begin()

    def begin(self) -> None:
        """Read the prompts of `request`, by `decoder`."""
        self._loop = beam_search.Loop(self.request, self.decoder)
        self._advance(self._loop.begin)

    def proceed(self, outputs: Any) -> None:
        """Go on with the model's outputs, up to the `inputs` of the next step unless that was the last."""
        self._advance(lambda: self._loop.proceed(outputs))

    def _advance(self, move: Callable[[], dict[str, Any] | None]) -> None:
        try:
            inputs = move()
            if inputs is None:
                self.result, self.ended = self._loop.result, True
            else:
                self.inputs = inputs
        except Exception as error:
            if not self.fails_alone:
                raise
            # Of its own options, most likely: the calls that it shares a batch with go on.
            self.error, self.ended = error, True
        self.ended |= self.decoder.is_over
        if self.ended:
            self.decoder.close()

    @property
    def fails_alone(self) -> bool:
        """Whether what it raises is kept as `error`, and not raised."""
        return self._tokens and self.decoder.has_moved

    def running(self) -> dict[int, Tensor]:
        """The hypotheses so far of each sentence that is still here, int64 `[M, length]`, by the sentence's number."""
        search = self.decoder.searching
        if search is None:
            return {}
        hypotheses = search.running().unflatten(0, (-1, self.decoder.beams))
        return dict(zip(search.live.sentence.tolist(), hypotheses, strict=True))

    def decided(self) -> dict[int, Decided]:
        """What is decided of each sentence that is still here, by the sentence's number."""
        search = self.decoder.searching
        if search is None:
            return {}
        if isinstance(search, BeamSearch):
            counts, tokens, _ = front.of_beam_search(search, 0, self.request.scores_only_fall).shared()
            each = zip(search.live.sentence.tolist(), counts.tolist(), tokens, strict=True)
            return {sentence: Decided(row[None, :count], [None]) for sentence, count, row in each}
        found = {}
        states = zip(search.live.scores.tolist(), search.live.unfinished.tolist(), strict=True)
        for (sentence, rows), (scores, goes_on) in zip(self.running().items(), states, strict=True):
            ended = [None if goes else score for score, goes in zip(scores, goes_on, strict=True)]
            found[sentence] = Decided(rows, ended)
        return found

    def abandon(self, sentence: int) -> None:
        """Let this sentence go, unfinished, before the step after the next."""
        self.decoder.abandoned.add(sentence)

    @property
    def sentences(self) -> int:
        return self.decoder.tree.batch

    @property
    def rows(self) -> int:
        return self.decoder.tree.batch * self.decoder.beams


class CallDecoder(TreeDecoder):
    """The decoder of one call: it reads the prompt itself, then its sentences move to the joint tree.

    From then on its own tree is but a clock, and what the search wants done is noted for the joint decoder.
    """

    def __init__(self, request: Request, layer_caches: CachesByModule, found: list[Found] | None) -> None:
        """`found`: where to put what a sentence ends with as soon as it does."""
        super().__init__(request, layer_caches=layer_caches)
        self._found, self._reported = found, set[int]()
        self._count = int(request.generation_config.num_return_sequences or 1)
        self.searching: Search | None = None
        self.abandoned: set[int] = set()  # sentences, which are to leave as if they had finished
        self.is_over = False  # none is left
        self.has_moved = False
        self.is_clearing = False  # sentences that have finished shall leave now
        self.num_finished = 0  # sentences that could leave
        self.parents: Tensor | None = None
        self.stay: Tensor | None = None

    def moved(self) -> None:
        """Its sentences are in the joint tree: nothing need be kept here."""
        self.has_moved = True
        self.close()
        self.encoder_outputs = self.source_mask = None

    def padding(self) -> Tensor:
        """The mask of its sources, `[B, N]`, which the model may have been spared."""
        if self.source_mask is not None:
            return self.source_mask
        states: Tensor = self.encoder_outputs.last_hidden_state
        return torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)

    def reorder(self, parents: Tensor) -> None:
        if self.has_moved:
            self.parents = parents
        else:
            super().reorder(parents)

    def leaving(self, search: Search) -> Tensor | None:
        self.searching = search
        may_leave = self.is_clearing or not self.has_moved
        given_up: list[int] = []
        if self.abandoned:
            given_up = [index for index, one in enumerate(search.live.sentence.tolist()) if one in self.abandoned]
        self.num_finished = search.num_finished()
        if not given_up and not (self.num_finished and (may_leave or self._found is not None)):
            return None
        leaving = search.finished_mask()
        if self._found is not None:
            self._report(search, leaving)
        if given_up:
            leaving[given_up] = True
            self.num_finished = int(leaving.sum())
            if self.num_finished == search.batch:
                self.is_over = True  # a step of no rows is none
                return None
        return leaving if may_leave or given_up else None

    def ended(self, search: Search | None) -> None:
        if self._found is not None and search is not None:
            self._report(search, torch.ones(search.batch, dtype=torch.bool, device="cpu"))

    def _report(self, search: Search, finished: Tensor) -> None:
        assert self._found is not None
        for row in finished.nonzero()[:, 0].tolist():
            sentence = int(search.live.sentence[row])
            if sentence not in self._reported | self.abandoned:
                self._reported.add(sentence)
                tokens, scores = search.hypotheses(row)
                self._found.append(Found(sentence, tokens[: self._count].clone(), scores[: self._count].clone()))

    def select(self, sentences: Tensor) -> None:
        if self.has_moved:
            self.stay, self.tree.batch = sentences, len(sentences)
        else:
            super().select(sentences)
        self.num_finished = 0
