"""Measures how exact slim caches of a generator's models are, layer by layer, on real activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastgen import config
from fastgen.cache.slim.accuracy import Sample, Verdict, judge
from fastgen.cache.slim.table import KINDS, Inspection, Layer
from fastgen.optimizer.fairseq.cache.slim import SENTENCES, read
from fastgen.optimizer.fairseq.request import Request, unsupported_reason

_NOT_PLAIN = "something else than plain linear layers makes its keys and values"


@torch.no_grad()
def inspect(generator: Any, sample: Mapping[str, Any]) -> Inspection:
    """See `fastgen.inspect`."""
    models, request = [*generator.model.models], _first_sentences(generator, sample)
    if reason := unsupported_reason(request):
        raise ValueError(f"This call has no slim caches: {reason}.")
    with config.configured(tier="stock", strict=False):
        hypotheses = generator.generate(
            models, request.sample, prefix_tokens=request.prefix_tokens, bos_token=request.bos_token
        )
    found: dict[nn.Module, tuple[bool, dict[str, Verdict]]] = {}

    def look(module: Any, given: Sample | None) -> None:
        _, worst = found.setdefault(module, (module.encoder_decoder_attention, {}))
        for kind in KINDS:
            verdict = Verdict(None, None, reason=_NOT_PLAIN) if given is None else judge(given, kind)
            worst[kind] = max(worst.get(kind, verdict), verdict, key=_badness)

    read(request, hypotheses, models, look)
    names = {
        module: name if len(models) == 1 else f"{number}: {name}"
        for number, model in enumerate(models)
        for name, module in model.named_modules()
    }
    layers = tuple(Layer(module, names[module], *one) for module, one in found.items())
    return Inspection(request.model_name, layers)


def _first_sentences(generator: Any, sample: Mapping[str, Any]) -> Request:
    """A request for a few sentences of the sample; a language model's prompts are made as fairseq's task makes them."""
    if "net_input" not in sample:
        raise ValueError("A sample without net_input says nothing of what the models are to read.")
    request = Request(generator, dict(sample), None, None, None)
    request.sample["net_input"] = inputs = request.inputs_of(slice(SENTENCES))
    if not generator.model.has_encoder():
        request.bos_token = generator.eos
        prompts = inputs["src_tokens"]
        request.prefix_tokens = prompts[:, 1:] if bool(prompts[:, 0].eq(generator.eos).all()) else prompts
    return request


def _badness(verdict: Verdict) -> tuple[bool, float]:
    return verdict.reason is not None, verdict.error or 0.0
