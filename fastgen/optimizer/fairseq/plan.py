"""What is decided about a call before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.optimizer import beam_streaming, gate
from fastgen.optimizer.fairseq.generate import beam_search
from fastgen.optimizer.fairseq.generate.joining import Part, joining
from fastgen.optimizer.fairseq.generate.shortlist import is_shortened
from fastgen.optimizer.fairseq.request import Request, unsupported_reason

_JOINED = "the sentences of several searches share a tree"
_COMPAT = "tier='compat' is configured"


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    decision: gate.Decision
    part: Part | None = None  # of the tree that several searches share, if this is one of these searches
    is_shortened: bool = False  # the host's loop gets the best tokens alone


def plan_call(request: Request) -> Plan:
    """How `request` runs.

    Raises:
        FallbackError: in strict mode: see `gate.decide`.
    """
    part: Part | None = None

    def unsupported() -> str | None:
        nonlocal part
        reason = unsupported_reason(request)
        part = None if reason else joining()
        return reason

    def not_fast() -> str | None:
        return _JOINED if part is not None else beam_search.unsupported_reason(request)

    # On a CPU the host's loop is as fast, which works on the best tokens alone; but it tells nothing on the way.
    streams = beam_streaming.listener() is not None
    decision = gate.decide(unsupported, not_fast, wants_fast=streams or _is_on_gpu(request))
    if streams and decision.tier != gate.FAST:
        raise ValueError(f"fastgen.stream needs fastgen's own beam search: {decision.reason or _COMPAT}.")
    return Plan(decision, part, decision.tier == gate.COMPAT and is_shortened(request.generator))


def _is_on_gpu(request: Request) -> bool:
    return request.source is not None and request.source.device.type != "cpu"
