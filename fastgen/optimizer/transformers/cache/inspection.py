"""Measures how exact slim caches of a model are, layer by layer, on real activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.cache.slim.accuracy import Sample, Verdict, judge
from fastgen.cache.slim.latent import Projections
from fastgen.cache.slim.table import KINDS, Inspection, Layer
from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.cache import slim
from fastgen.optimizer.transformers.equivalence import sample_of
from fastgen.optimizer.transformers.generate import beam_search
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.model.facts import facts_of
from fastgen.optimizer.transformers.model.session import Session, scale_of
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_on_tree

_STEPS, _FEW_STEPS = 24, 6  # tokens to generate as input of the trial; few if no weight is inverted
_POSITIONS = 64  # of the prompt and these tokens, at most


def inspect(model: Any, inputs: Mapping[str, Any]) -> Inspection:
    """See `fastgen.inspect`."""
    if (reason := slim.unsupported_reason(model)) is not None:
        raise ValueError(f"{type(model).__name__} has no slim caches: {reason}.")
    try:
        with interception.intercepting():
            model.generate(**inputs)
    except interception.Intercepted as intercepted:
        request, stock = intercepted.request, intercepted.stock
    else:
        raise ValueError("fastgen is disabled, or this search is none of those that it accelerates.")
    with torch.no_grad():
        if reason := unsupported_on_tree(request):
            raise ValueError(f"This call has no slim caches: {reason}.")
        return Inspection(type(model).__name__, tuple(inspect_request(request, stock, KINDS)))


def inspect_request(
    request: Request, stock: Callable[..., Any], kinds: Iterable[str], is_sparse: bool = False
) -> list[Layer]:
    """Judge every layer that can have a slim cache of one of these kinds, on a few sentences of the request.

    `is_sparse`: with a threshold.
    """
    kinds = list(kinds)
    steps = _FEW_STEPS if kinds == ["x"] else _STEPS
    ours = sample_of(request, steps=steps)
    with contextlib.closing(TreeDecoder(ours)) as decoder:
        run = beam_search.fast(ours, decoder) if ours.is_beam_search else beam_search.compat(ours, decoder, stock)
    ours = sample_of(request, steps=steps)  # again, as a run may change the request
    inputs: dict[str, Any] = {"use_cache": False}
    tokens, kwargs = run.sequences if ours.is_beam_search else run.sequences[:: ours.beams], ours.model_kwargs
    if ours.model.config.is_encoder_decoder:
        outputs = kwargs["encoder_outputs"]
        inputs["encoder_outputs"] = type(outputs)(last_hidden_state=outputs[0][:: ours.beams].contiguous())
        inputs |= {"decoder_input_ids": tokens}
        if kwargs.get("attention_mask") is not None:
            inputs["attention_mask"] = kwargs["attention_mask"][:: ours.beams]
    else:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            mask = nn.functional.pad(mask[:: ours.beams], (0, tokens.shape[1] - mask.shape[1]), value=1)
            inputs["attention_mask"] = mask[:, -_POSITIONS:]
        inputs["input_ids"] = tokens[:, -_POSITIONS:]
    capturing = _Capturing(ours.model, kinds, is_sparse)
    if "encoder_outputs" in inputs:
        capturing.slim.source = inputs["encoder_outputs"].last_hidden_state
    with torch.no_grad(), capturing.reading(ours.model):
        ours.model(**inputs)
    return capturing.layers


class _Capturing(Session):
    """Judges the attention modules during a forward pass, which it does not change."""

    def __init__(self, model: Any, kinds: Iterable[str], is_sparse: bool) -> None:
        self._is_sparse = is_sparse
        self._names = {module: name for name, module in model.named_modules()}
        self._inputs: dict[nn.Module, Tensor] = {}
        self._kinds, self.layers = list(kinds), list[Layer]()
        self._first_across: Projections | None = None
        attentions = list(slim.attention_modules(model))
        super().__init__(BeamTree(1, 1, 1), facts_of(model), dict.fromkeys(attentions, slim.LayerCaches()))
        self.products = LinearDispatcher("off")  # overridden only to note the inputs of projections
        for module in attentions:
            self.products.override(slim.projecting_layers(module)[0], self._noting(module))

    def _noting(self, module: nn.Module) -> Callable[[Tensor, Callable[[], Tensor]], Tensor]:
        def note(rows: Tensor, product: Callable[[], Tensor]) -> Tensor:
            self._inputs[module] = rows
            return product()

        return note

    def attend(
        self,
        inner: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if module in self._inputs:
            self.layers.append(self._judged(module, query, attention_mask, kwargs))
        return inner(module, query, key, value, attention_mask, *args, **kwargs)

    def _judged(self, module: nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Layer:
        inputs, is_rotary = self._inputs.pop(module), slim.is_rotary(module)
        # A model may have layers between the encoder output and the decoder.
        is_cross_attn = inputs is self.slim.source or inputs.shape[1] != query.shape[2]
        if mask is None and not is_cross_attn:  # then the attention function itself is causal
            mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
        bias = additive_mask(mask, query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        if (position_bias := kwargs.get("position_bias")) is not None:
            bias = position_bias if bias is None else bias + position_bias
        rotation = self.slim.rotation if is_rotary else None
        projections = slim.projections_of(module)
        if is_cross_attn and self._first_across is None:
            self._first_across = projections
        sample = Sample(
            projections,
            inputs,
            query,
            bias,
            scale_of(query, kwargs),
            None if rotation is None else (rotation[0][:, None], rotation[1][:, None]),
            self._first_across if is_cross_attn else None,
        )
        verdicts = {}
        for kind in self._kinds:
            if kind == "h" and not is_cross_attn:
                continue
            reason = slim.unsupported_kind(module, kind)
            verdicts[kind] = (
                judge(sample, kind, self._is_sparse) if reason is None else Verdict(None, None, reason=reason)
            )
        return Layer(module, self._names[module], is_cross_attn, verdicts)
