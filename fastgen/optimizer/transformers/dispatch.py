"""Which tier runs a request, and the record of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from fastgen import config, report
from fastgen.memory import limits
from fastgen.optimizer.transformers import interception, verification
from fastgen.optimizer.transformers.cache import planning
from fastgen.optimizer.transformers.equivalence import disproof
from fastgen.optimizer.transformers.generate import beam_search
from fastgen.optimizer.transformers.generate.argmax_head import may_screen
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.replay import conditions
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_reason
from fastgen.replay import statistics

_DIVERSE = "diverse beam search is fastgen's own: this version of transformers has moved its own to the Hub"


@limits.relief()
def run(request: Request, stock: Callable[..., Any]) -> Any:
    """Run `request` in the best tier it allows; `stock` is the host's own `_beam_search` or `_sample`."""
    interception.raise_intercepted(request, stock)
    settings = config.current()
    if settings.tier == "stock":
        return _stock(request, stock, "tier='stock' is configured")
    if reason := unsupported_reason(request) or disproof(request, stock):
        if settings.strict:
            raise report.FallbackError(reason)
        return _stock(request, stock, reason)
    reason = _DIVERSE if request.diverse else request.changed_rule if request.is_search else None
    if reason and settings.strict and settings.tier == "fast":
        raise report.FallbackError(reason)
    replayer = conditions.replayer_for(request, stock)
    start = time.perf_counter()
    screens, caches = may_screen(request, stock), planning.plan_for(request, stock)
    with contextlib.closing(TreeDecoder(request, None, replayer, screens, caches.kept)) as decoder:
        # What greedy search and sampling do between two steps is cheap: the host's own loop keeps all of its rules.
        if reason or settings.tier == "compat" or not request.is_search:
            tier, result = "compat", beam_search.compat(request, decoder, request.diverse or stock)
        else:
            tier, result = "fast", beam_search.fast(request, decoder)
        cache = decoder.cache_bytes(), decoder.cache_kind(), caches.plan
        decoder.hand_on()
    seconds = time.perf_counter() - start
    if replayer is not None:
        statistics.note(request.model, replayer)
    steps = decoder.tree.steps + 1  # the prompt's own forward pass chooses tokens too
    _record(request, tier, reason, steps, seconds, *cache)
    verification.note(request, tier)
    return result


def _stock(request: Request, stock: Callable[..., Any], reason: str) -> Any:
    start = time.perf_counter()
    result = request.run(request.diverse or stock)
    reason = f"{reason}; {_DIVERSE}" if request.diverse else reason
    _record(request, "stock", reason, None, time.perf_counter() - start)
    return result


def _record(
    request: Request,
    tier: str,
    reason: str | None,
    steps: int | None,
    seconds: float,
    cache_bytes: int | None = None,
    cache: str | None = None,
    plan: str | None = None,
) -> None:
    model = type(request.model).__name__
    with torch._C.DisableTorchFunction():  # a mode of the user's is not to see what we look at
        size = request.batch, request.beams
    report.record(report.Call("transformers", model, tier, reason, *size, steps, seconds, cache_bytes, cache, plan))
