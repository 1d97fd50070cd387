"""Decides, before a call runs, how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastgen.decoding.speculation import SpeculationPolicy
from fastgen.optimizer import gate
from fastgen.optimizer.transformers.cache.planning import Caches, plan_for
from fastgen.optimizer.transformers.equivalence import failed_equivalence
from fastgen.optimizer.transformers.generate.argmax_head import may_use_argmax_head
from fastgen.optimizer.transformers.generate.speculation import policy_for
from fastgen.optimizer.transformers.replay.conditions import replayer_for
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_reason
from fastgen.replay.replayer import Replayer

DIVERSE = "diverse beam search is fastgen's own: this version of transformers has moved its own to the Hub"


@dataclass(frozen=True)
class Plan:
    """The decisions about how one call runs."""

    decision: gate.Decision
    replayer: Replayer | None = None  # replays the steps
    uses_argmax_head: bool = False  # only the largest logit is used
    speculation: SpeculationPolicy | None = None  # decides when to draft
    caches: Caches = field(default_factory=lambda: Caches({}))


def plan_call(request: Request, stock: Callable[..., Any]) -> Plan:
    """Decide how `request` runs; `stock` is the host's own `_beam_search` or `_sample`.

    An untested model is tried first: see `equivalence`, and `cache.planning` for slim caches.

    Raises:
        FallbackError: in strict mode: see `gate.decide`.
    """

    def unsupported() -> str | None:
        return unsupported_reason(request) or failed_equivalence(request, stock)

    def not_fast() -> str | None:
        return DIVERSE if request.diverse else request.changed_rule

    # Greedy search and sampling do little between two steps: the host's own loop runs, with all of its rules.
    decision = gate.decide(unsupported, not_fast if request.is_beam_search else None)
    if decision.tier == gate.STOCK:
        return Plan(decision)
    replayer, caches = replayer_for(request, stock), plan_for(request, stock)
    policy = None if replayer is None or caches.layer_caches else policy_for(request)
    return Plan(decision, replayer, may_use_argmax_head(request, stock), policy, caches)
