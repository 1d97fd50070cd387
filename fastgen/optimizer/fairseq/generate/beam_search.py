"""Our loop in place of the host's `_generate`: plain beam search, which on a GPU does not wait for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq import search
from torch import Tensor

from fastgen import phases
from fastgen.decoding import front
from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch
from fastgen.optimizer import beam_streaming
from fastgen.optimizer.fairseq.foreign_code import called_one_by_one
from fastgen.optimizer.fairseq.model.decoder import TreeEnsemble
from fastgen.optimizer.fairseq.request import Request, has_own_blocker, has_own_search, is_own, own_rule


def unsupported_reason(request: Request) -> str | None:
    """Why the host's loop has to run over the tree; None if our loop can replace it."""
    generator, strategy = request.generator, request.generator.search
    is_plain = type(strategy) is search.BeamSearch and not strategy.stop_on_max_len
    if not is_plain or not is_own(strategy, search, "step") or has_own_search(generator):
        return f"the search is {type(strategy).__name__} with rules of its own, not plain beam search"
    if name := own_rule(generator):
        return f"the generator has its own {name}"
    if reason := called_one_by_one(generator.model):
        return f"each step has to be as in stock: {reason}"
    if has_own_blocker(generator):
        return "the generator has its own repeat_ngram_blocker"
    if request.constraints is not None:
        return "constraints are for another search"
    if generator.lm_model is not None:
        return "a language model is fused in"
    if generator.match_source_len:
        return "match_source_len rejects hypotheses that have ended"
    if 2 * request.beams >= generator.vocab_size:
        return "there are more candidates than tokens"
    prefix = request.prefix_tokens
    if prefix is not None and len(prefix) != request.batch:
        return "the prefix has not one row per sentence"
    if prefix is not None and bool((prefix.eq(generator.pad).cumsum(1) * prefix.eq(generator.eos)).any()):
        return "a prefix leaves a token open and ends the hypothesis later"
    return None


def _is_prefill(variables: dict[str, Any]) -> bool:
    """Of `generate`: whether the step reads the forced prefix."""
    prefix, chosen = variables.get("prefix"), variables.get("chosen")
    return chosen is not None and chosen.step <= (0 if prefix is None else prefix.shape[1])


@phases.marked(phases.LOOP, first=_is_prefill)
def generate(request: Request, ensemble: TreeEnsemble, blocker: Any) -> list[list[dict[str, Any]]] | None:
    """Do what the host's `_generate` does; None if `ensemble` turns out not to fit. `blocker`: of repeated n-grams."""
    generator = request.generator
    policy = CollectingPolicy(generator.len_penalty, generator.normalize_scores, request.max_steps - 1)
    assert generator.min_len <= policy.max_length, "min_len cannot be larger than max_len, please adjust these!"
    net_input = request.sample["net_input"]
    encoder_outs = ensemble.forward_encoder(net_input)
    if ensemble.reason:
        ensemble.encoded = encoder_outs
        return None
    if not ensemble.inner.has_encoder():
        encoder_outs = []
    chosen = ensemble.search(policy)
    stream = _streaming(request)
    states: list[dict[str, Any]] = [{} for _ in ensemble.inner.models]
    prefix = request.prefix_tokens
    ends = [] if prefix is None else prefix.eq(generator.eos).any(0).tolist()[: policy.max_length]
    while True:
        log_probs, attention = ensemble.forward_decoder(chosen.running(), encoder_outs, states, generator.temperature)
        log_probs = _allowed(generator, chosen.step, log_probs, prefix, policy.max_length)
        if prefix is not None and any(ends[chosen.step : chosen.step + 1]):
            # Where a prefix ends, all beams end and have to be equal. The host leaves the beams' attention as it is.
            ending = prefix[:, chosen.step].eq(generator.eos)
            chosen.level(ending)
            beams = log_probs.unflatten(0, (chosen.batch, chosen.beams))
            log_probs = torch.where(ending[:, None, None], beams[:, :1], beams).flatten(0, 1)
        if blocker is not None:
            log_probs = blocker(chosen.written(), log_probs, chosen.batch, chosen.beams, chosen.step)
        rows = chosen.choose(log_probs, attention)
        if chosen.done:
            found = chosen.result()
            if stream is not None:
                stream.finish(found[0][0]["tokens"][None])
            return found
        if stream is not None:
            stream.follow(chosen)
        # The number may be a step old: by now all may have finished.
        if ensemble.session.tree.should_evict(chosen.num_finished()) and not bool(chosen.finished_mask().all()):
            rows = rows.unflatten(0, (chosen.batch, chosen.beams))
            stay = chosen.evict(chosen.finished_mask())
            rows = rows.index_select(0, stay).flatten()
            prefix = prefix if prefix is None else prefix.index_select(0, stay)
        ensemble.reorder_incremental_state(states, rows)


def _streaming(request: Request) -> beam_streaming.BeamStreaming[FairseqBeamSearch] | None:
    """What passes tokens on to who listens to this call, if anybody does."""
    listener = beam_streaming.listener()
    if listener is None:
        return None
    listener.begin(request.batch)
    only_falls = request.generator.unk_penalty >= 0
    return beam_streaming.BeamStreaming(listener.put, 1, front.of_fairseq_beam_search, only_falls)


def _allowed(generator: Any, step: int, log_probs: Tensor, prefix: Tensor | None, max_length: int) -> Tensor:
    """Change log-probabilities `[B*M, V]` as the host does before it chooses tokens; `prefix`: int64 `[B, P]`."""
    log_probs.masked_fill_(log_probs.isnan(), -math.inf)
    log_probs[:, generator.pad] = -math.inf
    log_probs[:, generator.unk] -= generator.unk_penalty
    if step >= max_length:
        log_probs[:, : generator.eos] = -math.inf
        log_probs[:, generator.eos + 1 :] = -math.inf
    elif prefix is not None and step < prefix.shape[1]:
        forced = prefix[:, step].repeat_interleave(len(log_probs) // len(prefix))[:, None]  # [B*M, 1]
        alone = torch.full_like(log_probs, -math.inf).scatter_(1, forced, log_probs.gather(1, forced))
        return torch.where(forced.ne(generator.pad), alone, log_probs)
    if step < generator.min_len:
        log_probs[:, generator.eos] = -math.inf
    if generator.token_indices_to_suppress is not None:
        log_probs[:, generator.token_indices_to_suppress] = -math.inf
    return log_probs
