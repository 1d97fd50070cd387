"""Both tiers of beam search over the tree: our loop, and the host's own."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from fastgen.buffers import Buffers
from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.decoding.static_search import StaticSearch
from fastgen.decoding.token_search import TokenSearch
from fastgen.optimizer.transformers import chunks, host
from fastgen.optimizer.transformers.cache import stock_cache
from fastgen.optimizer.transformers.decoder import NOT_ROWS, TreeDecoder, selected
from fastgen.optimizer.transformers.processors import Banning, Processing
from fastgen.optimizer.transformers.requests import Request

Steps = Generator[dict[str, Any], Any, Any]


def fast(request: Request, decoder: TreeDecoder) -> Any:
    """Our loop: the host's search rules, sentences leave as they finish. Returns what the host returns."""
    loop = steps(request, decoder)
    try:
        inputs = next(loop)
        while True:
            inputs = loop.send(decoder.step(inputs))
    except StopIteration as end:
        return end.value


def steps(request: Request, decoder: TreeDecoder) -> Steps:
    """Our loop, which yields the host's inputs of each step, one row per beam, and is sent the model's outputs.

    It is for searches, and for what `refill` takes into a running batch without one.
    """
    model, config, beams = request.model, request.generation_config, request.beams
    keeps_all = request.keeps_all_rows
    all_scores: tuple[Tensor, ...] | None = () if keeps_all and config.output_scores else None
    all_logits: tuple[Tensor, ...] | None = () if keeps_all and config.output_logits else None
    buffers = decoder.tree.buffers
    process, is_stopped = Processing(buffers), request.stopper()
    may_evict = request.may_evict or not request.is_search

    def stops(tokens: Tensor, hypotheses: Callable[[], Tensor]) -> Tensor:
        return is_stopped(tokens, hypotheses, length=search.length, scores=all_scores)

    started = host.started(model, request.input_ids, request.model_kwargs)
    shared = decoder.shared(started)
    with decoder.reading(shared):
        outputs = host.prefill(model, request.input_ids[::beams], chunks.configuration(request), shared)
    decoder.plant(shared, outputs.logits)
    outputs.past_key_values = decoder.cache
    search = _search(request, decoder, buffers) if request.is_search else _token_search(request)
    takes_logits = search.takes_logits and all_scores is None and not config.do_sample
    # From here on the host's inputs have one row per beam, as it prepares them itself.
    rows = {**started, "past_key_values": decoder.cache}
    device = request.input_ids.device
    logits = _last(outputs, device).repeat_interleave(beams, dim=0)  # [B*M, V]
    while True:
        rows = model._update_model_kwargs_for_generation(outputs, rows, is_encoder_decoder=decoder.is_encoder_decoder)
        del outputs
        if all_logits is not None:
            all_logits += (logits.clone(),)  # a replayed step writes the next ones to the same memory
        parents = banned = None
        if isinstance(search, TokenSearch):
            parents = search.choose(request.logits_processor(search.running(), logits), stops)
        elif takes_logits:
            banned = process.banned(request.logits_processor, search.length, logits)
            parents = None if banned is None else search.choose_allowed(logits, banned, stops)
        if parents is None:
            assert isinstance(search, BeamSearch)
            log_probs = process(request.logits_processor, search.running(), logits)
            if all_scores is not None:
                all_scores += (log_probs.clone(),)
            parents = search.choose(log_probs, stops, config.do_sample, is_tied=banned is not None)
            del log_probs
        del logits
        decoder.reorder(parents)
        if search.done:
            break
        if may_evict and (leaving := decoder.leaving(search)) is not None:
            index = torch.arange(search.batch * beams, device=device)
            index = index[~leaving.repeat_interleave(beams)]
            rows = _kept(rows, index, search.batch * beams)
            request.keep(index)
            decoder.keep(search.evict(leaving))
        outputs = yield host.next_inputs(model, search.running(), rows)
        logits = _last(outputs, device)

    decoder.ended(search)
    found = search.result()
    if isinstance(search, TokenSearch):
        return found.tokens[:, :, : search.length].flatten(0, 1)
    count = config.num_return_sequences
    tokens, indices = found.tokens[:, :count].flatten(0, 1), found.rows[:, :count].flatten(0, 1)
    generated = (indices + 1).bool().sum(dim=1).max()
    tokens, indices = tokens[:, : request.input_ids.shape[1] + generated], indices[:, :generated]
    if not config.return_dict_in_generate:
        return tokens
    kind = GenerateBeamEncoderDecoderOutput if decoder.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
    return kind(
        sequences=tokens,
        sequences_scores=found.scores[:, :count].flatten() if config.output_scores else None,
        scores=all_scores,
        logits=all_logits,
        beam_indices=indices,
        past_key_values=stock_cache(decoder.cache, decoder.tree) if keeps_all else None,
    )


def compat(request: Request, decoder: TreeDecoder, stock: Callable[..., Any]) -> Any:
    """The host's own loop over the tree: it runs on a shallow copy of the model whose `forward` is ours."""
    model = request.model
    request = dataclasses.replace(request, generation_config=chunks.configuration(request))
    is_chunked = request.generation_config.prefill_chunk_size is not None
    if not request.is_search and type(request.logits_processor) is LogitsProcessorList:
        config = request.generation_config
        draws = config.do_sample and not config.output_scores
        request = dataclasses.replace(request, logits_processor=Banning(request.logits_processor, draws))
    proxy = object.__new__(type(model))
    proxy.__dict__.update(model.__dict__)

    @functools.wraps(model.forward)
    def forward(*args: Any, **inputs: Any) -> Any:
        if args or inputs.get("past_key_values") is not decoder.cache:
            return model.forward(*args, **inputs)
        if not decoder.is_planted:
            shared = decoder.shared(inputs)
            with decoder.reading(shared):
                outputs = model.forward(**shared)
            if is_chunked and decoder.tree.prompt_length < request.input_ids.shape[1]:
                return outputs  # of which the host uses the cache alone
            decoder.plant(shared, outputs.logits)
            outputs.past_key_values = decoder.cache
            outputs.logits = outputs.logits[:, -1:].repeat_interleave(decoder.beams, dim=0)
            return outputs
        return decoder.run(lambda **inputs: model.forward(**inputs), inputs)  # looked up within the session

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    proxy.__dict__["forward"] = forward
    result = request.run(stock, proxy, decoder.cache)
    if not isinstance(result, Tensor):
        result.past_key_values = stock_cache(decoder.cache, decoder.tree)
    return result


def _token_search(request: Request) -> TokenSearch:
    config = request.generation_config
    pad = config._pad_token_tensor
    fill = 0 if pad is None else int(pad)  # without one nothing ends before the last token
    return TokenSearch(request.input_ids, request.beams, config.max_length, fill, request.seeds)


def _search(request: Request, decoder: TreeDecoder, buffers: Buffers) -> BeamSearch:
    config = request.generation_config
    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    policy = FinishingPolicy(
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_length=config.max_length,
        prompt_length=request.input_ids.shape[1],
    )
    # Enough candidates that M go on although any of M beams may end with any of the end tokens.
    candidates = max(2, 1 + (len(eos) if eos is not None else 0)) * request.beams
    fill = int(pad or eos[0]) if eos is not None else -1
    arguments = (request.input_ids, request.beams, candidates, policy, fill)
    if decoder.replayer is None or not decoder.replayer.waits_for_nothing or not request.chooses_by_numbers:
        return BeamSearch(*arguments, buffers)
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
        decoder.search = key, StaticSearch(*arguments, replayer, eos, is_late=request.may_evict)
    else:
        decoder.search[1].restart(request.input_ids, replayer)
    return decoder.search[1]


def _last(outputs: Any, device: torch.device) -> Tensor:
    """Logits of the last position, float32 `[rows, V]`."""
    return outputs.logits[:, -1, :].to(dtype=torch.float32, device=device)


def _kept(rows: dict[str, Any], index: Tensor, of: int) -> dict[str, Any]:
    """These rows, int64 `[rows']`, of the host's inputs, which have one row per beam."""
    return {name: value if name in NOT_ROWS else selected(value, index, of) for name, value in rows.items()}
