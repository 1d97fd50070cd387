"""A batch kept full: several calls of `generate` decode together, and as sentences leave the next call joins in.

Each call keeps its own search, processors and prompt; the tree and the model's forward passes are shared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

from fastgen import config, report
from fastgen.cache.batch_tree import BatchTree
from fastgen.decoding.beam_search import BeamSearch
from fastgen.decoding.sampling import Sampling
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import dispatch, equivalence, interception
from fastgen.optimizer.transformers.cache import planning, slim
from fastgen.optimizer.transformers.cache.tree_cache import TreeEncoderDecoderCache, resized
from fastgen.optimizer.transformers.generate import beam_search
from fastgen.optimizer.transformers.model import modules
from fastgen.optimizer.transformers.model.decoder import NOT_ROWS, TreeDecoder, selected
from fastgen.optimizer.transformers.model.facts import facts_of
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_reason
from fastgen.optimizer.transformers.versions import CACHE, CACHE_LENGTH

# `model_type` of those whose only absolute positions are `position_ids` or a module told `CACHE_LENGTH`.
_REFILLED = frozenset(
    """bart blenderbot gemma gemma2 gpt2 gpt_neox llama m2m_100 marian mbart mistral mt5 opt pegasus phi3 qwen3 t5
    umt5""".split()
)
CachesByModule = Mapping[torch.nn.Module, slim.LayerCaches] | None
_MOST_CALLS = 8  # at once: each adds its own few small operations to a step
_CLEAR_FROM = 1 / 8  # of the sentences have finished: then it pays to copy the others' keys


def unrefillable_model(model: Any) -> str | None:
    """Why no batch of this model can be kept full, or None."""
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:
        return "the model has its own generate"
    facts = facts_of(model)
    if model.config.model_type not in _REFILLED or not facts.is_hosts_own:
        return f"{type(model).__name__} has not been tried with sentences at different positions"
    return next((f"{finding}: such code may see other rows" for finding in facts.foreign), None)


def unrefillable(model: Any, call: Mapping[str, Any], *, tokens: bool = False) -> str | None:
    """Why a call like this one, of `model.generate`, cannot be decoded with others, or None.

    `tokens`: see `ContinuousBatch.admit`.
    """
    if reason := unrefillable_model(model):
        return reason
    try:
        with interception.intercepting():
            model.generate(**call)
    except interception.Intercepted as intercepted:
        request, stock = intercepted.request, intercepted.stock
    else:
        return "fastgen is disabled, or the search is none of those that it accelerates"
    if not request.is_beam_search and request.generation_config.do_sample and _draws_itself(model, call):
        return "its forward passes draw random numbers, and so change what is sampled"
    with torch.no_grad():
        return _unrefillable(request, stock, tokens)


def run(model: Any, calls: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[tuple[int, Any]]:
    """What `model.generate(**call)` returns for each of `calls`, with the call's number, as it is ready.

    A call begins when there is room for its sentences among the `batch_size` that decode together; one that cannot
    be decoded with others runs alone. All calls have the same options: they differ in their inputs.
    """
    waiting = enumerate(calls)
    following = next(waiting, None)
    with contextlib.closing(ContinuousBatch(model, batch_size)) as running:
        while following is not None or running.calls:
            while following is not None and running.has_room(_sentences(following[1])):
                call = running.admit(*following)
                following = next(waiting, None)
                if call.ended:
                    yield call.number, call.result
            for call in running.step():
                yield call.number, call.result


class ContinuousBatch:
    """A batch that calls of `model.generate` enter and leave while it decodes. All have the same number of beams."""

    def __init__(self, model: Any, batch_size: int) -> None:
        """`close` it in the end. `batch_size`: sentences that decode together, at most."""
        self._model, self._size = model, batch_size
        self._planned = _Planned()
        self._joint: BatchDecoder | None = None
        self._live: list[Call] = []
        self._entering: list[Call] = []
        self._started, self._admitted = time.perf_counter(), 0

    @property
    def calls(self) -> list[Call]:
        """Those that have not ended."""
        return [*self._live, *self._entering]

    def has_room(self, sentences: int) -> bool:
        """Whether a call of so many sentences may enter now. If there is no other, it may."""
        calls = self.calls
        taken = sum(call.sentences for call in calls)
        return not calls or (len(calls) < _MOST_CALLS and taken + sentences <= self._size)

    def admit(
        self, number: int, kwargs: Mapping[str, Any], *, tokens: bool = False, seeds: Sequence[int] | None = None
    ) -> Call:
        """Begin `model.generate(**kwargs)`: its prompts are read. It may have ended when this returns.

        Args:
            number: whatever the caller knows it by.
            tokens: greedy search and sampling are wanted in the batch, too, and `found` for each sentence.
            seeds: of each sentence's samples.
        """
        call = Call(self._model, self._planned, number, kwargs, tokens, seeds)
        if not call.ended:
            self._entering.append(call)
            self._admitted += call.request.batch
        return call

    def step(self) -> list[Call]:
        """One step for all sentences; returns the calls that have ended."""
        if not self.calls:
            return []
        if self._joint is None:
            self._joint = BatchDecoder(self._entering[0].request, self._size, self._planned.layer_caches)
        self._joint.regroup(self._entering)
        self._entering = []
        if self._joint.calls:
            self._joint.step_all()
        self._live = [call for call in self._joint.calls if not call.ended]
        return [call for call in self._joint.calls if call.ended]

    def close(self) -> None:
        """Let go of the tree, and report."""
        if self._joint is not None:
            joint, seconds = self._joint, time.perf_counter() - self._started
            how = joint.steps, seconds, joint.cache_bytes(), joint.cache_kind(), self._planned.plan
            name = type(self._model).__name__
            report.record(report.Call("transformers", name, "fast", None, self._admitted, joint.beams, *how))
            joint.close()  # which forgets what it had
            self._joint = None


def _sentences(kwargs: Mapping[str, Any]) -> int:
    return int(next(value.shape[0] for value in kwargs.values() if isinstance(value, Tensor)))


def _unrefillable(request: Request, stock: Callable[..., Any], tokens: bool = False) -> str | None:
    """Why this call cannot be decoded with others, or None. `tokens`: greedy search and sampling can."""
    if config.current().tier not in ("auto", "fast"):
        return "another tier is configured"
    if not request.is_beam_search and not tokens:
        return "it is no beam search"
    if request.diverse:
        return "beams in groups are searched by a loop of their own"
    if not (request.may_evict if request.is_beam_search else request.has_free_rows):
        return "what is asked for needs all sentences of a batch until its end"
    return (
        unrefillable_model(request.model)
        or unsupported_reason(request, shares=tokens)
        or request.changed_rule
        or equivalence.failed_equivalence(request, stock)
    )


_drawing: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _draws_itself(model: Any, call: Mapping[str, Any]) -> bool:
    """Whether forward passes use torch's random stream, as layers that might be dropped do in some versions."""
    if model not in _drawing:
        first = {name: value[:1] for name, value in call.items() if isinstance(value, Tensor)}
        before = torch.get_rng_state()
        model.generate(**first, do_sample=False, num_beams=1, num_return_sequences=1, max_new_tokens=2)
        _drawing[model] = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    return _drawing[model]


class _Planned:
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


class Call:
    """One call of `generate`, suspended at each of its steps."""

    def __init__(
        self,
        model: Any,
        planned: _Planned,
        number: int,
        kwargs: Mapping[str, Any],
        tokens: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> None:
        """See `ContinuousBatch.admit`."""
        self.number, self._planned, self._tokens = number, planned, tokens
        self.result: Any = None
        self.ended = False
        self.error: Exception | None = None  # which ended it, if `tokens`: else it is raised
        self.found: list[Found] = []  # of sentences that have finished since the caller took the last ones
        try:
            with interception.intercepting():
                self.result, self.ended = model.generate(**kwargs), True
            return
        except interception.Intercepted as intercepted:
            self.request, stock = intercepted.request, intercepted.stock
        self.request.seeds = seeds if self.request.generation_config.do_sample else None
        self._start(stock)  # outside: what it raises has nothing to do with the interception

    @torch.no_grad()
    def _start(self, stock: Callable[..., Any]) -> None:
        if _unrefillable(self.request, stock, self._tokens):
            self.result, self.ended = dispatch.run(self.request, stock), True
            return
        layer_caches = self._planned.of(self.request, stock)
        self.decoder = CallDecoder(self.request, layer_caches, self.found if self._tokens else None)
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
            if not self._tokens or not self.decoder.has_moved:
                raise
            # Of its own options, most likely: the calls that it shares a batch with go on.
            self.error, self.ended = error, True
        self.ended |= self.decoder.is_over
        if self.ended:
            self.decoder.close()

    def running(self) -> dict[int, Tensor]:
        """By its number, the hypotheses so far of each sentence that is still here, int64 `[M, length]`."""
        search = self.decoder.searching
        if search is None:
            return {}
        hypotheses = search.running().unflatten(0, (-1, self.decoder.beams))
        return dict(zip(search.live.sentence.tolist(), hypotheses, strict=True))

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
        self.searching: BeamSearch | Sampling | None = None
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

    def leaving(self, search: BeamSearch | Sampling) -> Tensor | None:
        self.searching = search
        leaving = search.finished_mask()
        if self._found is not None:
            self._report(search, leaving)
        given_up = [index for index, one in enumerate(search.live.sentence.tolist()) if one in self.abandoned]
        leaving[given_up] = True
        self.num_finished = int(leaving.sum())
        if given_up and self.num_finished == search.batch:
            self.is_over = True  # a step of no rows is none
            return None
        may_leave = self.is_clearing or not self.has_moved or bool(given_up)
        return leaving if self.num_finished and may_leave else None

    def ended(self, search: BeamSearch | Sampling) -> None:
        if self._found is not None:
            self._report(search, torch.ones(search.batch, dtype=torch.bool))

    def _report(self, search: BeamSearch | Sampling, finished: Tensor) -> None:
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


class BatchDecoder(TreeDecoder):
    """Runs the model over the sentences of several calls at once."""

    tree: BatchTree

    def __init__(self, request: Request, rows: int, layer_caches: CachesByModule) -> None:
        """`rows`: sentences to make room for at once; `layer_caches`: the attention modules whose caches are slim."""
        tree = BatchTree(rows, request.beams, request.input_ids.device, Buffers(request.model))
        super().__init__(request, tree, layer_caches=layer_caches)
        self._rows = rows
        self.session.patches |= _absolute_positions(self.model)
        self.calls: list[Call] = []  # in the order of their rows
        self.steps = 0

    @torch.no_grad()
    def regroup(self, entering: list[Call]) -> None:
        """Do what the calls' searches have noted, drop the sentences that have left and take in new calls'."""
        beams, device = self.beams, self.tree.ancestry().device
        first, parents, stay = 0, [], []
        for call in self.calls:
            decoder = call.decoder
            if decoder.parents is None:  # it failed before it chose any: its rows leave as they are
                decoder.parents = torch.arange(call.rows, device=device)
            before = len(decoder.parents) // beams
            parents.append(decoder.parents + first * beams)
            if not call.ended:
                stay.append(first + (torch.arange(before, device=device) if decoder.stay is None else decoder.stay))
            decoder.parents = decoder.stay = None
            first += before
        if parents:
            self.tree.reorder(torch.cat(parents))
        staying = torch.cat(stay) if stay else torch.arange(0, device=device)
        if entering or len(staying) < first:
            self.session.products.look_again()  # whoever takes results, or brings calls, may have edited weights
            self._move(staying, [call.decoder for call in entering])
        self.calls = [*(call for call in self.calls if not call.ended), *entering]

    def _move(self, stay: Tensor, newcomers: list[CallDecoder]) -> None:
        self._measure()
        self.tree.regroup(stay, [decoder.tree for decoder in newcomers])
        if isinstance(self.cache, TreeEncoderDecoderCache):
            self._move_sources(self.cache, stay, newcomers)
            self.cache.self_attention_cache.cover()
        else:
            self.cache.cover()
        for decoder in newcomers:
            decoder.moved()

    def _move_sources(self, cache: TreeEncoderDecoderCache, stay: Tensor, newcomers: list[CallDecoder]) -> None:
        """The same for the encoder's outputs, and cross-attention's keys and values."""
        outputs = [decoder.encoder_outputs for decoder in newcomers]
        masks = [decoder.padding() for decoder in newcomers]
        if self.source_mask is not None:
            outputs.insert(0, selected(self.encoder_outputs, stay, len(self.source_mask)))
            masks.insert(0, self.source_mask.index_select(0, stay))
        # No longer than the longest source that is still here: padding costs attention.
        length = max(int(mask.any(0).nonzero().max()) + 1 for mask in masks if len(mask))
        states = [resized(output.last_hidden_state, 1, length) for output in outputs]
        self.encoder_outputs = type(outputs[0])(last_hidden_state=torch.cat(states))
        self.source_mask = torch.cat([resized(mask, 1, length) for mask in masks])
        self._hand_source()
        cache.regroup(stay, [decoder.cache for decoder in newcomers], length, self._rows)

    @torch.no_grad()
    def step_all(self) -> None:
        """One step of the model for all calls, and of each call's search."""
        for call in self.calls:
            call.decoder.tree.steps += 1
        self.session.spans = [(call.rows, call.decoder.tree.length) for call in self.calls]
        inputs = self._inputs()
        self.session.knows_positions = isinstance(inputs.get("position_ids"), Tensor)
        outputs = self.step(inputs)
        self.steps += 1
        # Decided for all: the joint tree is copied once, whoever leaves.
        num_finished = sum(call.decoder.num_finished for call in self.calls)
        is_clearing = num_finished >= max(1, int(self.tree.batch * _CLEAR_FROM))
        logits = outputs.logits.split([call.rows for call in self.calls])
        for call, part in zip(self.calls, logits, strict=True):
            call.decoder.is_clearing = is_clearing
            call.proceed(type(outputs)(logits=part, **{CACHE: call.decoder.cache}))

    def _inputs(self) -> dict[str, Any]:
        """The calls' inputs, one below the other; what has no rows is the same for all."""
        inputs: dict[str, Any] = {}
        for name, value in self.calls[0].inputs.items():
            has_rows = isinstance(value, Tensor) and value.ndim and value.shape[0] == self.calls[0].rows
            if has_rows and name not in NOT_ROWS:
                # Masks are of different lengths, and the tree has its own.
                is_mask = name in ("attention_mask", "decoder_attention_mask")
                value = value if is_mask else torch.cat([call.inputs[name] for call in self.calls])
            inputs[name] = value
        inputs[CACHE] = self.cache
        if inputs.get("cache_position") is not None:
            inputs["cache_position"] = torch.full_like(inputs["cache_position"], self.tree.length)
        return inputs


def _absolute_positions(model: torch.nn.Module) -> dict[tuple[type, str], modules.Wrapper]:
    """Wrappers for the modules that are told how many tokens came before: each call has its own number."""
    return {
        (owner, "forward"): _at_each_position
        for owner in {type(module) for module in model.modules()}
        if CACHE_LENGTH in inspect.signature(owner.forward).parameters
    }


def _at_each_position(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` once for the rows of each call; it returns `[rows, 1, d]` or, the same for all rows, without them."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def at_each_position(*args: Any, **kwargs: Any) -> Tensor:
        session = interception.current()
        if session is None or session.spans is None:
            return forward(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        total, first, parts = sum(rows for rows, _ in session.spans), 0, []
        for rows, position in session.spans:
            own = {name: _of_rows(value, first, rows, total) for name, value in arguments.items()}
            own[CACHE_LENGTH] = position
            # Not told by the host, the model counts them from the joint clock.
            if isinstance(own.get("position_ids"), Tensor) and not session.knows_positions:
                own["position_ids"] = torch.full_like(own["position_ids"], position)
            part = forward(**own)
            parts.append(part.reshape(-1, 1, part.shape[-1]).expand(rows, -1, -1))
            first += rows
        return torch.cat(parts)

    return at_each_position


def _of_rows(value: Any, first: int, rows: int, total: int) -> Any:
    """The part of a tensor, or of a shape, that belongs to these of all rows."""
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == total:
        return value[first : first + rows]
    if isinstance(value, tuple) and value[:1] == (total,):
        return (rows, *value[1:])
    return value
