"""Decides, before a call runs, how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastgen.decoding.speculation import SpeculationPolicy
from fastgen.optimizer import gate
from fastgen.optimizer.transformers.cache.planning import Caches, plan_for
from fastgen.optimizer.transformers.equivalence import HOST_FAILED, failed_equivalence
from fastgen.optimizer.transformers.generate.argmax_head import may_use_argmax_head
from fastgen.optimizer.transformers.generate.speculation import policy_for
from fastgen.optimizer.transformers.replay.conditions import replayer_for
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import off_tree_reason, unsupported_reason
from fastgen.replay.replayer import Replayer

DIVERSE = "diverse beam search is fastgen's own: this version of transformers has moved its own to the Hub"


@dataclass(frozen=True)
class Plan:
    """The decisions about how one call runs."""

    decision: gate.Decision
    off_tree: str | None = None  # why the call runs over the host's own cache, one row per beam
    replayer: Replayer | None = None  # replays the steps
    uses_argmax_head: bool = False  # only the largest logit is used
    speculation: SpeculationPolicy | None = None  # decides when to draft
    caches: Caches = field(default_factory=lambda: Caches({}))


def plan_call(request: Request, stock: Callable[..., Any]) -> Plan:
    """Decide how `request` runs; `stock` is the host's own `_beam_search` or `_sample`.

    An untested model is tried first: see `equivalence`, and `cache.planning` for slim caches. A model that cannot run
    on the tree is tried over the host's own cache.

    Raises:
        FallbackError: in strict mode: see `gate.decide`.
    """

    off_tree: str | None = None

    def unsupported() -> str | None:
        nonlocal off_tree
        if reason := unsupported_reason(request):
            return reason
        off_tree = off_tree_reason(request) or failed_equivalence(request, stock)
        if off_tree is not None and request.users_cache is not None:
            return off_tree
        if off_tree is None or off_tree.startswith(HOST_FAILED):
            return off_tree
        failed = failed_equivalence(request, stock, by_rows=True)
        return failed and (off_tree if failed == off_tree else f"{off_tree}; {failed}")

    def not_fast() -> str | None:
        return DIVERSE if request.diverse else request.changed_rule

    # Greedy search and sampling do little between two steps: the host's own loop runs, with all of its rules.
    decision = gate.decide(unsupported, not_fast if request.is_beam_search else None)
    if decision.tier == gate.STOCK:
        return Plan(decision)
    if off_tree is not None:
        return Plan(decision, off_tree)
    replayer, is_users = replayer_for(request, stock), request.users_cache is not None
    caches = Caches({}) if is_users else plan_for(request, stock)
    drafts = replayer is not None and not (caches.layer_caches or is_users or request.calls_back)
    policy = policy_for(request) if drafts else None
    return Plan(decision, None, replayer, may_use_argmax_head(request, stock), policy, caches)
