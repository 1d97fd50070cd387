"""Runs one call that the host's `generate` has prepared, and records it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fastgen.memory import limits
from fastgen.optimizer import gate
from fastgen.optimizer.transformers import interception, streaming, verification, versions, word_times
from fastgen.optimizer.transformers.cache import prefixes, users_cache
from fastgen.optimizer.transformers.generate import beam_search, joint_calls
from fastgen.optimizer.transformers.generate.speculation import SpeculativeDecoder
from fastgen.optimizer.transformers.model.base import Decoder
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.model.row_decoder import RowDecoder
from fastgen.optimizer.transformers.plan import DIVERSE, Plan, plan_call
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import statistics


@limits.relief()
def run(request: Request, stock: Callable[..., Any]) -> Any:
    """Run `request` in the best tier it allows; `stock` is the host's own `_beam_search` or `_sample`."""
    interception.raise_intercepted(request, stock)
    if (joint := joint_calls.current()) is not None:
        return joint.run(request, stock, run_alone)
    return run_alone(request, stock)


def run_alone(request: Request, stock: Callable[..., Any]) -> Any:
    """Run `request` as `run` does, in a batch of its own."""
    record = _record_of(request)
    asked, request = request, users_cache.taken(word_times.without_attentions(request))
    plan = plan_call(request, stock)
    if (reason := streaming.why_not_streamed(request, plan.decision)) is not None:
        return _refuse(asked, stock, gate.Decision(gate.STOCK, reason), record)
    if plan.decision.tier == gate.STOCK:
        return _run_stock(asked, stock, plan.decision, record)
    with contextlib.closing(_decoder(request, plan)) as decoder:
        decoder.prefixes = prefixes.begun(request, decoder.cache)
        if plan.decision.tier == gate.FAST:
            result = beam_search.fast(request, decoder)
        else:
            result = beam_search.compat(request, decoder, request.diverse or stock)
        if request.users_cache is not None:
            users_cache.hand_back(request.users_cache, decoder.result_cache())
            if not isinstance(result, torch.Tensor):
                setattr(result, versions.CACHE, request.users_cache)
        cache = decoder.cache_bytes(), decoder.cache_kind(), plan.off_tree or plan.caches.plan
        decoder.store_graph()
    # The forward pass of the prompt chooses tokens, too.
    record.done(plan.decision, decoder.num_steps + 1, *cache)
    if plan.replayer is not None:
        statistics.note(request.model, plan.replayer)
    verification.note(request, plan.decision.tier)
    if asked is not request and request.users_cache is None:
        word_times.note_source(result, request)
    return result


def _decoder(request: Request, plan: Plan) -> Decoder:
    if plan.off_tree is not None:
        return RowDecoder(request)
    if plan.speculation is not None and plan.replayer is not None:
        return SpeculativeDecoder(request, plan.replayer, plan.uses_argmax_head, plan.speculation)
    return TreeDecoder(request, None, plan.replayer, plan.uses_argmax_head, plan.caches.layer_caches)


def _refuse(request: Request, stock: Callable[..., Any], decision: gate.Decision, record: gate.Record) -> Any:
    """Let the host say what it says to a streamer with beams: an error, or nothing if it samples."""
    try:
        request = streaming.refused(request)
    except ValueError:
        record.done(decision)
        raise
    return _run_stock(request, stock, decision, record)


def _run_stock(request: Request, stock: Callable[..., Any], decision: gate.Decision, record: gate.Record) -> Any:
    result = request.run(request.diverse or stock)
    reason = f"{decision.reason}; {DIVERSE}" if request.diverse else decision.reason
    record.done(gate.Decision(decision.tier, reason))
    return result


def _record_of(request: Request) -> gate.Record:
    with torch._C.DisableTorchFunction():  # a mode of the user's is not to see these look-ups
        return gate.Record("transformers", type(request.model).__name__, request.batch, request.beams)
