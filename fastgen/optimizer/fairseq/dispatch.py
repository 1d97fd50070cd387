"""One call, from the host's `generate` to the record of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen import config, ops
from fastgen.memory import arena, limits
from fastgen.optimizer import gate
from fastgen.optimizer.fairseq import verification
from fastgen.optimizer.fairseq.cache.slim import look_at
from fastgen.optimizer.fairseq.generate import beam_search
from fastgen.optimizer.fairseq.generate.joining import JoiningEnsemble
from fastgen.optimizer.fairseq.generate.shortlist import Shortlist
from fastgen.optimizer.fairseq.model.decoder import TreeEnsemble, decode_over_the_tree
from fastgen.optimizer.fairseq.model.views import standing_in
from fastgen.optimizer.fairseq.plan import Plan, plan_call
from fastgen.optimizer.fairseq.request import Request, has_own_blocker, is_diverse
from fastgen.optimizer.verification import is_on, note_accelerated
from fastgen.replay import statistics


@limits.relief()
def run(request: Request, stock: Callable[..., Any]) -> Any:
    """Run our search or the host's, `stock`, over the tree or as it is, and return its hypotheses."""
    if not is_on():
        return _run(request, stock)

    def again(view: Any, sample: dict[str, Any]) -> Any:
        return stock(view, sample, request.prefix_tokens, request.constraints, request.bos_token)

    return verification.run(request, lambda: _run(request, stock), again, *_mended(request))


def _run(request: Request, stock: Callable[..., Any]) -> Any:
    record = gate.Record("fairseq", request.model_name, request.batch, request.beams)
    plan = plan_call(request)
    is_configured = config.current().tier == gate.STOCK  # then nothing is mended either
    view, sample = (request.generator, request.sample) if is_configured else _mended(request)

    def hosts() -> Any:
        return stock(view, sample, request.prefix_tokens, request.constraints, request.bos_token)

    if plan.decision.tier == gate.STOCK:
        result = hosts()
        record.done(plan.decision)
        return result
    shortlist = Shortlist(request, view) if plan.is_shortened else None
    if plan.part is not None:  # its steps are recorded with those of the others
        joined = view.__dict__["model"] = JoiningEnsemble(request, plan.part, shortlist)
        result = hosts()
        if joined.reason:
            record.done(gate.Decision(gate.STOCK, joined.reason))
        return result
    with contextlib.closing(decode_over_the_tree(request, view, shortlist)) as ensemble:
        return _search(request, plan, ensemble, hosts, view.repeat_ngram_blocker, record)


def _search(
    request: Request,
    plan: Plan,
    ensemble: TreeEnsemble,
    hosts: Callable[[], Any],
    blocker: Any,
    record: gate.Record,
) -> Any:
    """Our search, or the host's, over the tree; `hosts`: runs the host's, `blocker`: of repeated n-grams."""
    is_fast = plan.decision.tier == gate.FAST
    result = beam_search.generate(request, ensemble, blocker) if is_fast else None
    if result is None:
        is_fast = False
        result = hosts()
    session = ensemble.session
    session.measure()
    ensemble.store_graph()
    if not ensemble.reason:
        look_at(request, result)
    arena.settle()
    if ensemble.replayer is not None:
        statistics.note(request.generator.model.single_model, ensemble.replayer, ensemble.owner)
    if ensemble.reason:
        record.done(gate.Decision(gate.STOCK, ensemble.reason))
        return result
    decision = plan.decision if is_fast else gate.Decision(gate.COMPAT, plan.decision.reason)
    record.done(decision, session.tree.steps, session.cache_bytes, session.cache, ensemble.plan)
    note_accelerated(request)
    return result


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
            ops.ban_repeated_ngrams_(tokens, lprobs, self._size, step + 1)
            return
        bans = torch.zeros_like(lprobs, dtype=torch.float32)
        ops.ban_repeated_ngrams_(tokens, bans, self._size, step + 1)
        lprobs += bans
