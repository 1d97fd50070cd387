"""Slim caches for fairseq's attention modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import config, report
from fastgen.cache.slim import planner
from fastgen.cache.slim.accuracy import Sample, judge
from fastgen.cache.slim.latent import Choice, Projections, Slim, slim_cache, state_of_weights
from fastgen.cache.tree import additive_mask
from fastgen.memory.release import keeper
from fastgen.optimizer.fairseq.foreign_code import called_one_by_one, layers_of, watched
from fastgen.optimizer.fairseq.model.streams import STREAMS, attends_in_streams, has_streams
from fastgen.optimizer.fairseq.model.views import is_plain, replaced
from fastgen.optimizer.fairseq.request import Request, calls_back
from fastgen.replay import store

SENTENCES = 2  # of a call on which caches of keys or values alone are judged
# Stored keys and values do not follow a later edit of a weight; those that a slim cache computes would.
_EDITABLE = "code of yours runs between the steps, and might edit the weights"
_AUTOCAST = "what autocast rounds are keys and values"


def plan_for(request: Request, source: Tensor) -> tuple[Choice, str | None]:
    """Which caches of a call are slim, and why, in words; `source`: see `Request.source`."""
    wanted = _wanted()
    if wanted == "kv":
        return Choice(), None
    if torch.is_autocast_enabled(source.device.type):
        return Choice(), None if wanted == "auto" else _AUTOCAST
    if calls_back(request):
        return Choice(), None if wanted == "auto" else _EDITABLE
    decoder = request.generator.model.single_model.decoder
    if (some := next(decoder.parameters(), None)) is None or not any(map(_is_plain, _modules(decoder))):
        return Choice(), None if wanted == "auto" else "something else than plain linear layers projects"
    own = layers_of(decoder)[0].self_attn
    across = [layer.encoder_attn for layer in layers_of(decoder) if layer.encoder_attn is not None]
    models, heads = len(request.generator.model.models), own.num_heads
    width = across[0].kdim if across else 0
    counts = models * sum(not attends_in_streams(layer.self_attn) for layer in layers_of(decoder)), models * len(across)
    geometry = planner.Geometry(*counts, heads, heads, own.head_dim, own.embed_dim, width)
    dtype, positions = some.dtype, int(source.shape[1]) if across else 0
    rows = request.beams * (STREAMS if has_streams(decoder) else 1)
    call = planner.Call(request.batch, rows, 1, positions, request.max_steps, dtype.itemsize)
    plan = planner.plan_on(source.device, dtype, geometry, call, wanted)
    reasons = [_refused(model.decoder, wanted) for model in request.generator.model.models]
    if wanted in ("k", "v") and (reason := _untriable(request)):
        reasons.append(f"no output is looked at: {reason}")
    return plan.choice, "; ".join(filter(None, (str(plan), *reasons)))


def _wanted() -> str:
    """The cache that the user asks for; "h" counts as "k", as only transformers' models have "h"."""
    wanted = config.current().cache
    return "k" if wanted == "h" else wanted


def fixed_choice(device: torch.device) -> Choice:
    """The caches of a batch that many calls share: slim ones only where the user asks for them."""
    wanted = _wanted()
    is_slim = wanted != "auto" and not torch.is_autocast_enabled(device.type)
    return planner.asked_for(wanted) if is_slim else Choice()


def slim_of(module: Any, kind: str) -> Slim | None:
    """The slim cache of this kind for an attention module; None if the module stores keys and values."""
    if kind == "kv" or not _is_plain(module):
        return None
    if kind in ("k", "v") and _reason(module, kind) is not None:
        return None
    threshold = config.current().cache_threshold
    kind = "x" if kind == "e" else kind
    judged = _judged.get(module)
    if kind == "x" or judged is None:
        return slim_cache(kind, _projections(module), threshold)
    if (kind, threshold) not in judged.caches:
        judged.caches[kind, threshold] = slim_cache(kind, _projections(module), threshold)
    return judged.caches[kind, threshold]


@dataclass(frozen=True)
class _Judged:
    weights: Hashable  # state of the weights when they were judged
    reasons: dict[str, str | None]  # why a cache of a kind is refused, None if it is not
    caches: dict[tuple[str, float], Slim] = field(default_factory=dict)  # by kind and threshold: they invert a weight


_judged: weakref.WeakKeyDictionary[nn.Module, _Judged] = weakref.WeakKeyDictionary()
_UNTRIED = "none of its outputs has been looked at yet: that of this call will be"


@keeper
def release() -> None:
    """Forget all judgements, and the inverted weights with them."""
    _judged.clear()


def _reason(module: nn.Module, kind: str) -> str | None:
    judged = _judged.get(module)
    return _UNTRIED if judged is None or judged.weights != _state_of(module) else judged.reasons[kind]


def _reasons(decoder: Any, kind: str) -> list[str]:
    """Why some of the decoder's attention modules cannot have a cache of this kind."""
    return [reason for module in _modules(decoder) if kind in ("k", "v") and (reason := _reason(module, kind))]


def _refused(decoder: Any, kind: str) -> str | None:
    reasons = _reasons(decoder, kind)
    return f"{len(reasons)} attentions store keys and values: {reasons[0]}" if reasons else None


def _is_plain(module: Any) -> bool:
    """Whether plain linear layers make the module's keys and values, and scores depend on nothing but keys."""
    return not attends_in_streams(module) and all(map(is_plain, _layers(module)))


def _reads_plainly(module: Any) -> bool:
    projections = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
    return attends_in_streams(module) or all(map(is_plain, projections))


def _modules(decoder: Any) -> list[Any]:
    return [module for layer in layers_of(decoder) for module in (layer.self_attn, layer.encoder_attn) if module]


def look_at(request: Request, hypotheses: list[Any]) -> None:
    """If caches of keys or values alone are wanted, judge them on this call's output, once for a model's weights."""
    kind = _wanted()
    if kind not in ("k", "v") or request.source is None or torch.is_autocast_enabled(request.source.device.type):
        return
    models = [model for model in request.generator.model.models if _UNTRIED in _reasons(model.decoder, kind)]
    if models and not _untriable(request):
        try:
            read(request, hypotheses, models, _Noting())
            for owner in (*models, request.generator.model):
                store.drop(owner)  # steps recorded with the old inverted weights: no call will take them again
        except Exception as error:  # the host's code may raise anything, and the call itself has succeeded
            report.log(f"{request.model_name} stores keys and values: a trial failed ({type(error).__name__}: {error})")


def _untriable(request: Request) -> str | None:
    """Why the models must not read anything but the search's inputs, so that there is no trial; None if they may."""
    ensemble = request.generator.model
    if reason := called_one_by_one(ensemble):
        return reason
    attentions = [module for model in ensemble.models for module in _modules(model.decoder)]
    if not all(map(_reads_plainly, attentions)):  # their code for a whole target differs from that for a step
        return "something else than plain linear layers is in its attention"
    encoders = [(model, model.encoder) for model in ensemble.models] if ensemble.has_encoder() else []
    return next((reason for model, encoder in encoders if (reason := watched(model, encoder))), None)


# Called with an attention module and a sample of its inputs, None where something else than linear layers projects.
Look = Callable[[Any, "Sample | None"], None]


class _Noting:
    """Judges caches of keys alone and of values alone on every sample, and keeps the reasons against them."""

    def __init__(self) -> None:
        self._reasons: dict[nn.Module, dict[str, str | None]] = {}

    def __call__(self, module: nn.Module, sample: Sample | None) -> None:
        if sample is None:  # the module stores keys and values in any case
            return
        reasons = self._reasons.setdefault(module, {})
        for kind in ("k", "v"):
            reasons[kind] = reasons.get(kind) or judge(sample, kind).reason
        _judged[module] = _Judged(_state_of(module), dict(reasons))


@torch.no_grad()
def read(request: Request, hypotheses: list[Any], models: list[Any], look: Look) -> None:
    """Let these models read the hypotheses of the first sentences, and call `look` for each attention module."""
    generator = request.generator
    found = [sentence for sentence, its in enumerate(hypotheses) if its]  # a constrained search may find nothing
    for sentence in found[:SENTENCES]:
        one = request.inputs_of(slice(sentence, sentence + 1))
        encoded = generator.model.forward_encoder(one) if generator.model.has_encoder() else []
        tokens = hypotheses[sentence][0]["tokens"]
        before = torch.cat([tokens.new_tensor([request.start]), tokens[:-1]])[None]
        for number, model in enumerate(generator.model.models):
            if model in models:
                source = encoded[number] if encoded else None
                _looked_at(model.decoder, look).extract_features(before, source)


def _looked_at(decoder: Any, look: Look) -> Any:
    layers = []
    for layer in layers_of(decoder):
        attention = {"self_attn": _LookedAt(layer.self_attn, look)}
        if layer.encoder_attn is not None:
            attention["encoder_attn"] = _LookedAt(layer.encoder_attn, look)
        layers.append(replaced(layer, **attention))
    return replaced(decoder, layers=layers)


class _LookedAt:
    def __init__(self, module: Any, look: Look) -> None:
        self._module, self._look = module, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, **more: Any
    ) -> tuple[Tensor, Any]:
        module = self._module
        if not _is_plain(module):
            self._look(module, None)
        else:
            queries = module.q_proj(query).unflatten(2, (module.num_heads, -1)).permute(1, 2, 0, 3)  # [1, H, P, D]
            bias = more.get("attn_mask")
            bias = None if bias is None else bias[None, None]
            if key_padding_mask is not None:
                hidden = additive_mask(~key_padding_mask.bool(), query.dtype)[:, None, None]
                bias = hidden if bias is None else bias + hidden
            self._look(module, Sample(_projections(module), key.transpose(0, 1), queries, bias, module.scaling))
        output: tuple[Tensor, Any] = module(query, key, value, key_padding_mask=key_padding_mask, **more)
        return output


def _state_of(module: nn.Module) -> Hashable:
    """A value that changes with the weights of the key and value projections."""
    return state_of_weights(parameter for layer in _layers(module) for parameter in layer.parameters())


def _layers(module: Any) -> tuple[Any, Any]:
    return module.k_proj, module.v_proj


def _projections(module: Any) -> Projections:
    """Views of the key and value projections' weights, which follow later changes."""
    layers, heads = _layers(module), module.num_heads
    weights = (layer.weight.unflatten(0, (heads, -1)) for layer in layers)
    biases = (None if layer.bias is None else layer.bias.unflatten(0, (heads, -1)) for layer in layers)
    return Projections(*weights, *biases)
