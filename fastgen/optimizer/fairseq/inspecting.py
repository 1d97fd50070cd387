"""How exact slim caches of a generator's models are: each layer's attention, tried on real activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastgen.cache.admission import Sample, Verdict, judge
from fastgen.cache.inspection import KINDS, Inspection, Layer
from fastgen.optimizer.fairseq.requests import Request, unsupported_reason
from fastgen.optimizer.fairseq.slim import read


@torch.no_grad()
def inspect(generator: Any, sample: Mapping[str, Any]) -> Inspection:
    """See `fastgen.inspect`."""
    models = [*generator.model.models]
    request = Request(generator, dict(sample), None, None, None)
    if reason := unsupported_reason(request):
        raise ValueError(f"This call has no slim caches: {reason}.")
    hypotheses = generator.generate(models, request.sample)
    found: dict[nn.Module, tuple[bool, dict[str, Verdict]]] = {}

    def look(module: Any, given: Sample) -> None:
        _, worst = found.setdefault(module, (module.encoder_decoder_attention, {}))
        for kind in KINDS:
            verdict = judge(given, kind)
            worst[kind] = max(worst.get(kind, verdict), verdict, key=_badness)

    read(request, hypotheses, models, look)
    names = {
        module: name if len(models) == 1 else f"{number}: {name}"
        for number, model in enumerate(models)
        for name, module in model.named_modules()
    }
    layers = tuple(Layer(module, names[module], is_across, verdicts) for module, (is_across, verdicts) in found.items())
    if not layers:
        raise ValueError("This call has no slim caches: something else than plain linear layers projects.")
    return Inspection(request.model_name, layers)


def _badness(verdict: Verdict) -> tuple[bool, float]:
    return verdict.reason is not None, verdict.error or 0.0
