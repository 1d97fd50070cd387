"""Which tier runs a request, and the record of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen import config, report
from fastgen.memory import arena, limits
from fastgen.optimizer.fairseq import verification
from fastgen.optimizer.fairseq.cache.slim import look_at
from fastgen.optimizer.fairseq.generate import beam_search
from fastgen.optimizer.fairseq.generate.joining import JoiningEnsemble, joining
from fastgen.optimizer.fairseq.generate.shortlist import Shortlist, is_shortened
from fastgen.optimizer.fairseq.model.decoder import decode_over_the_tree
from fastgen.optimizer.fairseq.model.views import standing_in
from fastgen.optimizer.fairseq.request import Request, has_own_blocker, is_diverse, unsupported_reason
from fastgen.optimizer.verification import is_on, note_accelerated
from fastgen.replay import statistics

_JOINED = "the sentences of several searches share a tree"


@limits.relief()
def run(request: Request, stock: Callable[..., Any]) -> Any:
    """Run our search or the host's, `stock`, over the tree or as it is, and return its hypotheses."""
    if not is_on():
        return _run(request, stock)

    def again(view: Any, sample: dict[str, Any]) -> Any:
        return stock(view, sample, request.prefix_tokens, request.constraints, request.bos_token)

    return verification.run(request, lambda: _run(request, stock), again, *_mended(request))


def _run(request: Request, stock: Callable[..., Any]) -> Any:
    settings = config.current()
    start = time.perf_counter()
    if settings.tier == "stock":
        result = stock(request.generator, request.sample, request.prefix_tokens, request.constraints, request.bos_token)
        _record(request, "stock", "tier='stock' is configured", start)
        return result
    reason = unsupported_reason(request)
    part = None if reason else joining()
    # On a CPU the host's loop is as fast, which works on the best tokens alone.
    is_fast = not reason and (settings.tier == "fast" or (settings.tier == "auto" and _is_on_gpu(request)))
    slow = None
    if is_fast:
        slow = _JOINED if part is not None else beam_search.unsupported_reason(request)
        is_fast = slow is None
    if settings.strict and (reason or (slow and settings.tier == "fast")):
        raise report.FallbackError(str(reason or slow))

    view, sample = _mended(request)
    may_shorten = not reason and not is_fast and is_shortened(request.generator)
    shortlist = Shortlist(request, view) if may_shorten else None
    if part is not None:  # its steps are recorded with those of the others
        joined = view.__dict__["model"] = JoiningEnsemble(request, part, shortlist)
        result = stock(view, sample, request.prefix_tokens, request.constraints, request.bos_token)
        if joined.reason:
            _record(request, "stock", joined.reason, start)
        return result
    ensemble = None if reason else decode_over_the_tree(request, view, shortlist)
    with contextlib.closing(ensemble) if ensemble else contextlib.nullcontext():
        result = beam_search.generate(request, ensemble, view.repeat_ngram_blocker) if is_fast and ensemble else None
        if result is None:
            is_fast = False
            result = stock(view, sample, request.prefix_tokens, request.constraints, request.bos_token)
        if ensemble is not None:
            ensemble.session.measure()
            ensemble.hand_on()
            if not ensemble.reason:
                look_at(request, result)
            arena.settle()
            if ensemble.replayer is not None:
                statistics.note(request.generator.model.single_model, ensemble.replayer, ensemble.owner)
    if ensemble is None or ensemble.reason:
        _record(request, "stock", ensemble.reason if ensemble else reason, start)
        return result
    session = ensemble.session
    tier, reason = ("fast", None) if is_fast else ("compat", slow if settings.tier == "fast" else None)
    cache = session.cache_bytes, session.cache, ensemble.plan
    _record(request, tier, reason, start, session.tree.steps, *cache)
    note_accelerated(request)
    return result


def _is_on_gpu(request: Request) -> bool:
    assert request.source is not None
    return request.source.device.type != "cpu"


def _mended(request: Request) -> tuple[Any, dict[str, Any]]:
    """A stand-in for the generator, which this call may change, and its sample, without the host's bugs."""
    view, sample = standing_in(request.generator), request.sample
    if request.generator.repeat_ngram_blocker is not None and not has_own_blocker(request.generator):
        view.__dict__["repeat_ngram_blocker"] = _NgramBlocker(request)
    if is_diverse(request):
        # This search keeps a row per sentence and looks it up by the numbers that sentences have in their
        # dataset. Without those numbers the host counts within the batch.
        sample = {name: value for name, value in sample.items() if name != "id"}
    return view, sample


class _NgramBlocker:
    """Bans what `no_repeat_ngram_size` says.

    Without its CUDA extension the host compares with the end of the buffer that tokens are written to, which
    is padding until the last step, and bans nothing. A token that the prefix forces is never banned.
    """

    def __init__(self, request: Request) -> None:
        from fastgen import ops  # not before somebody asks for a ban: the first import may compile them

        self._ops = ops
        self._size = int(request.generator.repeat_ngram_blocker.no_repeat_ngram_size)
        self._forced_steps = 0 if request.prefix_tokens is None else request.prefix_tokens.shape[1]

    def __call__(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        """`tokens`: int64 `[B*M, length]`, of which `step + 1` are written; `lprobs`: `[B*M, V]`, changed in place."""
        if step >= self._forced_steps:
            self.ban(tokens, lprobs, step)
            return lprobs
        best, token = lprobs.max(dim=1, keepdim=True)
        forced = torch.isfinite(lprobs).sum(dim=1, keepdim=True) == 1
        self.ban(tokens, lprobs, step)
        return lprobs.scatter_(1, token, torch.where(forced, best, lprobs.gather(1, token)))

    def ban(self, tokens: Tensor, lprobs: Tensor, step: int) -> None:
        """Make what would repeat an n-gram -inf, forced or not."""
        if self._size == 1:  # the token that starts every hypothesis may begin an n-gram, but is never what is banned
            tokens, step = tokens[:, 1:], step - 1
        if lprobs.dtype != torch.float64:
            self._ops.ban_repeated_ngrams_(tokens, lprobs, self._size, step + 1)
            return
        bans = torch.zeros_like(lprobs, dtype=torch.float32)
        self._ops.ban_repeated_ngrams_(tokens, bans, self._size, step + 1)
        lprobs += bans


def _record(
    request: Request,
    tier: str,
    reason: str | None,
    start: float,
    steps: int | None = None,
    cache_bytes: int | None = None,
    cache: str | None = None,
    plan: str | None = None,
) -> None:
    seconds, size = time.perf_counter() - start, (request.batch, request.beams)
    name = request.model_name
    report.record(report.Call("fairseq", name, tier, reason, *size, steps, seconds, cache_bytes, cache, plan))
