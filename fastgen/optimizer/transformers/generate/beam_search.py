"""Both tiers of beam search over the tree: our loop, and the host's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fastgen import phases
from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.decoding.device_beam_search import DeviceBeamSearch
from fastgen.decoding.native_beam_search import NativeBeamSearch
from fastgen.decoding.sampling import Sampling
from fastgen.decoding.search import Search
from fastgen.decoding.static_beam_search import StaticBeamSearch
from fastgen.decoding.trie_rows import TrieRows
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import criteria, interception, versions
from fastgen.optimizer.transformers.cache.recurrent import rows_of
from fastgen.optimizer.transformers.generate import chunked_prefill, tries
from fastgen.optimizer.transformers.generate.allowed_tokens import AllowedTokens, Begun
from fastgen.optimizer.transformers.generate.processors import Banning, Processing
from fastgen.optimizer.transformers.model.base import Decoder, selected_inputs
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.streaming import BeamStream

__phase__ = phases.LOOP


def fast(request: Request, decoder: Decoder) -> Any:
    """Our loop: the host's search rules, sentences leave as they finish. Returns what the host returns."""
    loop = Loop(request, decoder)
    inputs = loop.begin()
    while inputs is not None:
        inputs = loop.proceed(decoder.step(inputs))
    return loop.result


class Loop:
    """Our loop, one step at a time: it gives the host's inputs of each step, one row per beam, and is given the
    model's outputs.

    It is for searches, and for what enters a batch that is kept full without one. No generator: an exception of
    the user's, StopIteration among them, passes through as it is.
    """

    def __init__(self, request: Request, decoder: Decoder) -> None:
        self.request, self.decoder = request, decoder
        self.result: Any = None  # what the host would return, once there are no further inputs
        keeps_all, config = request.keeps_all_rows, request.generation_config
        self._all_scores: tuple[Tensor, ...] | None = () if keeps_all and config.output_scores else None
        self._all_logits: tuple[Tensor, ...] | None = () if keeps_all and config.output_logits else None
        self._process, self._is_stopped = Processing(decoder.buffers), request.stopper()
        self._stream = None if request.held is None else BeamStream(request)
        may_evict = request.may_evict if request.is_beam_search else request.has_free_rows
        self._may_evict = may_evict and self._stream is None

    def begin(self) -> dict[str, Any] | None:
        """Read the prompt and choose the first tokens; returns the next step's inputs, None if that was all."""
        request, decoder, model = self.request, self.decoder, self.request.model
        if self._stream is not None:
            self._stream.begin()
        started = versions.started(model, request.input_ids, request.model_kwargs)
        shared = decoder.shared(started)
        with decoder.reading(shared):
            tokens = request.input_ids[:: request.beams]
            outputs = versions.prefill(model, tokens, chunked_prefill.configuration(request), shared)
        decoder.begin_decoding(shared, outputs)
        setattr(outputs, versions.CACHE, decoder.cache)
        search = _search(request, decoder, decoder.buffers) if request.is_beam_search else _token_search(request)
        self._search: Search = search
        if isinstance(search, BeamSearch):
            search.shows_rows = request.calls_back
        samples = request.generation_config.do_sample
        self._takes_logits = search.takes_logits and self._all_scores is None and not samples
        # From here on the host's inputs have one row per beam, as it prepares them itself.
        self._rows = {**started, versions.CACHE: decoder.cache}
        logits = _last(outputs, request.input_ids.device).repeat_interleave(request.beams, dim=0)  # [B*M, V]
        self._allowed = AllowedTokens.of(request, logits.shape[1])
        if self._allowed is not None and isinstance(self._allowed.rows, TrieRows):
            self._process.constraint = tries.Constraint(self._allowed.rows)
        return self._choose(outputs, logits)

    def proceed(self, outputs: Any) -> dict[str, Any] | None:
        """Choose the next tokens by the model's outputs of a step; returns as `begin` does."""
        return self._choose(outputs, _last(outputs, self.request.input_ids.device))

    def _choose(self, outputs: Any, logits: Tensor) -> dict[str, Any] | None:
        request, decoder, search, model = self.request, self.decoder, self._search, self.request.model
        self._rows = model._update_model_kwargs_for_generation(
            outputs, self._rows, is_encoder_decoder=decoder.is_encoder_decoder
        )
        del outputs
        if self._all_logits is not None:
            self._all_logits += (logits.clone(),)  # a replayed step writes the next ones to the same memory
        parents = self._parents(search, logits)
        del logits
        criteria.remind(request.stopping_criteria, search.length, request.input_ids)
        decoder.reorder(parents)
        if search.done:
            decoder.ended(search)
            self.result = self._found()
            return None
        if self._stream is not None:
            self._stream.follow(search)
        if self._may_evict and (leaving := decoder.leaving(search)) is not None:
            rows = search.batch * request.beams
            stay = search.evict(leaving)
            index = rows_of(stay, request.beams)
            self._rows = selected_inputs(self._rows, index, rows)
            request.select(index)
            decoder.select(stay)
            if self._allowed is not None:
                self._allowed.select(index)
        return versions.next_inputs(model, search.running(), self._rows)

    def _parents(self, search: Search, logits: Tensor) -> Tensor:
        """The row that each beam continues, int64 `[B*M]`; the search has chosen their tokens."""
        processors = self.request.logits_processor
        if not search.ranks:
            scores = processors(search.running(), logits)
            if self._all_scores is not None:
                self._all_scores += (scores.clone(),)
            return search.choose(scores, self._stops)
        if self._allowed is None:
            return self._ranked(search, logits)
        assert isinstance(search, BeamSearch)
        begun = None
        if self._all_scores is None and not self.request.generation_config.do_sample:
            tokens = self._tokens(search)
            parents = self._allowed.choose(search, tokens, processors, self._process, logits, self._stops)
            if parents is not None:
                return parents
            begun = self._allowed.begun
        parents = self._ranked(search, logits, begun)
        self._allowed.advance(search, parents)
        return parents

    def _ranked(self, search: Search, logits: Tensor, begun: Begun | None = None) -> Tensor:
        """Do what `_parents` does, by the scores of all tokens. `begun`: what has been done already."""
        processors = self.request.logits_processor
        if begun is not None:
            return search.choose(self._process.apply(begun.processors, begun.tokens, begun.scores), self._stops)
        banned = None
        if self._takes_logits:
            banned = self._process.banned(processors, search.length, logits)
            if banned is not None and (parents := search.choose_allowed(logits, banned, self._stops)) is not None:
                return parents
        log_probs = self._process(processors, self._tokens(search), logits)
        if self._all_scores is not None:
            self._all_scores += (log_probs.clone(),)
        samples = self.request.generation_config.do_sample
        return search.choose(log_probs, self._stops, samples, is_tied=banned is not None)

    def _tokens(self, search: Search) -> Tensor:
        """The rows that processors are shown, int64 `[B*M, length]`: what they write there stays, but at the first step
        the host shows a copy."""
        prompts = self.request.input_ids
        is_first = search.length == prompts.shape[1] and versions.PREFILLS
        return prompts if is_first and self.request.calls_back else search.running()

    def _stops(self, tokens: Tensor, hypotheses: Callable[[], Tensor]) -> Tensor:
        return self._is_stopped(tokens, hypotheses, length=self._search.length, scores=self._all_scores)

    def _as_sampled(self, tokens: Tensor) -> Any:
        """What the host's `_sample` returns for these tokens."""
        if not self.request.keeps_all_rows:
            return tokens
        kind = GenerateEncoderDecoderOutput if self.decoder.is_encoder_decoder else GenerateDecoderOnlyOutput
        cache = {versions.CACHE: self.decoder.result_cache()}
        return kind(sequences=tokens, scores=self._all_scores, logits=self._all_logits, **cache)

    def _found(self) -> Any:
        search, config, decoder = self._search, self.request.generation_config, self.decoder
        found = search.result()
        if self._stream is not None:
            self._stream.finish(found)
        if not search.ranks:
            return self._as_sampled(found.tokens[:, :, : search.length].flatten(0, 1))
        count = config.num_return_sequences
        tokens, indices = found.tokens[:, :count].flatten(0, 1), found.rows[:, :count].flatten(0, 1)
        generated = (indices + 1).bool().sum(dim=1).max()
        tokens = tokens[:, : self.request.input_ids.shape[1] + generated]
        if not config.return_dict_in_generate:
            return tokens
        cache = decoder.result_cache() if self.request.keeps_all_rows else None
        kind = GenerateBeamEncoderDecoderOutput if decoder.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
        return kind(
            sequences=tokens,
            sequences_scores=found.scores[:, :count].flatten() if config.output_scores else None,
            scores=self._all_scores,
            logits=self._all_logits,
            beam_indices=indices[:, :generated],
            **{versions.CACHE: cache},
        )


def compat(request: Request, decoder: Decoder, stock: Callable[..., Any]) -> Any:
    """The host's own loop over the tree: where it calls the model, in this thread, our step answers.

    It runs on the user's model itself, so that what methods write to `self` stays.
    """
    request = dataclasses.replace(request, generation_config=chunked_prefill.configuration(request))
    is_chunked = request.generation_config.prefill_chunk_size is not None
    config = request.generation_config
    # The host's processors copy the logits, or do not: then a user's that writes to scores writes to what is returned.
    keeps_logits = config.output_logits and config.return_dict_in_generate and request.calls_back
    if not (request.is_beam_search or keeps_logits) and type(request.logits_processor) is LogitsProcessorList:
        draws = config.do_sample and not config.output_scores
        request = dataclasses.replace(request, logits_processor=Banning(request.logits_processor, draws))

    def call(model: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        if args or inputs.get(versions.CACHE) is not decoder.cache:
            return model(*args, **inputs)
        if not decoder.has_begun:
            shared = decoder.shared(inputs)
            with decoder.reading(shared):
                outputs = model(**shared)
            if is_chunked and decoder.prompt_tokens() < request.input_ids.shape[1]:
                return outputs  # of which the host uses the cache alone
            decoder.begin_decoding(shared, outputs)
            setattr(outputs, versions.CACHE, decoder.cache)
            outputs.logits = outputs.logits[:, -1:].repeat_interleave(decoder.beams, dim=0)
            return outputs
        return decoder.run(model, inputs)

    # 4.57 reads a prompt in chunks by the model's `forward`, past its hooks.
    with interception.calling(request.model, call, by_forward=is_chunked and not versions.PREFILLS):
        result = request.run(stock, decoder.cache)
    decoder.ended(None)
    if not isinstance(result, Tensor):
        setattr(result, versions.CACHE, decoder.result_cache())
    return result


def _token_search(request: Request) -> Sampling:
    config = request.generation_config
    pad = config._pad_token_tensor
    fill = 0 if pad is None else int(pad)  # without one nothing ends before the last token
    return Sampling(request.input_ids, request.beams, config.max_length, fill, request.seeds)


def _search(request: Request, decoder: Decoder, buffers: Buffers) -> BeamSearch:
    config = request.generation_config
    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    policy = FinishingPolicy(
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_length=config.max_length,
        prompt_length=request.input_ids.shape[1],
        sorts_drawn=versions.sorts_drawn(),
    )
    # Enough candidates that M go on although any of M beams may end with any of the end tokens.
    candidates = max(2, 1 + (len(eos) if eos is not None else 0)) * request.beams
    fill = int(pad or eos[0]) if eos is not None else -1
    arguments = (request.input_ids, request.beams, candidates, policy, fill)
    if decoder.replayer is None or not decoder.replayer.waits_for_nothing or not request.chooses_by_numbers:
        if request.input_ids.device.type == "cpu":
            return NativeBeamSearch(*arguments, buffers)
        return DeviceBeamSearch(*arguments, buffers, may_repeat_step=request.stops_by_last_token)
    replayer = decoder.replayer.another()
    key = (
        request.input_ids.shape,
        request.beams,
        candidates,
        policy,
        fill,
        str(config.eos_token_id),
        request.may_evict,
    )
    if decoder.search is None or decoder.search[0] != key:
        decoder.search = key, StaticBeamSearch(*arguments, replayer, eos, is_late=request.may_evict)
    else:
        decoder.search[1].restart(request.input_ids, replayer)
    return decoder.search[1]


def _last(outputs: Any, device: torch.device) -> Tensor:
    """Logits of the last position, float32 `[rows, V]`."""
    return outputs.logits[:, -1, :].to(dtype=torch.float32, device=device)
