"""What is decided about a call before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastgen.optimizer import gate
from fastgen.optimizer.transformers.cache.planning import Caches, plan_for
from fastgen.optimizer.transformers.equivalence import failed_equivalence
from fastgen.optimizer.transformers.generate.argmax_head import may_use_argmax_head
from fastgen.optimizer.transformers.replay.conditions import replayer_for
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_reason
from fastgen.replay.replayer import Replayer

DIVERSE = "diverse beam search is fastgen's own: this version of transformers has moved its own to the Hub"


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    decision: gate.Decision
    replayer: Replayer | None = None  # of its steps
    uses_argmax_head: bool = False  # nobody sees more of the logits than which is the largest
    caches: Caches = field(default_factory=lambda: Caches({}))


def plan_call(request: Request, stock: Callable[..., Any]) -> Plan:
    """How `request` runs; `stock` is the host's own `_beam_search` or `_sample`.

    A model that nobody has tested is tried first: see `equivalence`, and `cache.planning` for slim caches.

    Raises:
        FallbackError: in strict mode: see `gate.decide`.
    """

    def unsupported() -> str | None:
        return unsupported_reason(request) or failed_equivalence(request, stock)

    def not_fast() -> str | None:
        return DIVERSE if request.diverse else request.changed_rule

    # What greedy search and sampling do between two steps is cheap: the host's own loop keeps all of its rules.
    decision = gate.decide(unsupported, not_fast if request.is_beam_search else None)
    if decision.tier == gate.STOCK:
        return Plan(decision)
    replayer = replayer_for(request, stock)
    return Plan(decision, replayer, may_use_argmax_head(request, stock), plan_for(request, stock))
