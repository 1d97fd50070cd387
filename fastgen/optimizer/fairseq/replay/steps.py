"""Runs the host's decoder as a function of tensors alone, so that decode steps can be captured and replayed."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import config
from fastgen.optimizer.fairseq.foreign_code import called_one_by_one, layers_of
from fastgen.optimizer.fairseq.model.streams import has_streams
from fastgen.optimizer.fairseq.model.views import replaced, standing_in
from fastgen.optimizer.fairseq.replay.guards import guards_of_steps
from fastgen.optimizer.fairseq.request import Request, calls_back
from fastgen.patching.replaced_code import are_of, is_watched
from fastgen.replay import statistics
from fastgen.replay.guarded import GuardedReplayer
from fastgen.replay.guards import ModelGuards
from fastgen.replay.replayer import Replayer


def replayer_for(request: Request) -> Replayer | None:
    """The replayer of this call's steps; None if they are not replayed."""
    ensemble, source = request.generator.model, request.source
    assert source is not None
    rows, steps = request.batch * request.beams, request.max_steps
    if not statistics.are_wanted(ensemble.single_model, source.device.type, request.batch == 1, rows, steps):
        return None
    if config.current().cache_threshold:  # which weights are left out differs from step to step
        return None
    if torch.is_autocast_enabled(source.device.type):  # a replay would not cast weights again
        return None
    if _is_foreign(ensemble):
        return None
    if not calls_back(request):
        return Replayer(source.device)
    guarded = GuardedReplayer(source.device, functools.partial(_look, ensemble))
    return guarded if guarded.may_replay else None


def _is_foreign(ensemble: Any) -> bool:
    """Whether code of the user's sees the steps: it expects the model to be called."""
    if called_one_by_one(ensemble):
        return True
    modules = [module for model in ensemble.models for module in model.decoder.modules()]
    return is_watched(modules) or not are_of({"fairseq", "fastgen"}, modules)


def _look(ensemble: Any) -> ModelGuards | None:
    """Guards of the models' steps; None if code of the user's sees them, or if a change could not be seen."""
    guards = None if _is_foreign(ensemble) else guards_of_steps(ensemble.models)
    return guards if guards is not None and guards.is_complete else None


class ReplayedSteps:
    """The steps of one call on a static tree."""

    def __init__(self, ensemble: Any, replayer: Replayer) -> None:
        """`ensemble`: a view of the host's ensemble, whose decoders run over the tree."""
        self.replayer = replayer
        self._embed = [model.decoder.embed_positions for model in ensemble.models]
        self._positions: list[Tensor | None] = []  # position embeddings of the current step
        self._padding: list[Tensor] = []  # padding masks, kept alive: tensors derived from them are found by id
        models = [
            standing_in(model, decoder=self._of_tensors(model.decoder, number))
            for number, model in enumerate(ensemble.models)
        ]
        self.ensemble = replaced(ensemble, models=models, single_model=models[0])

    def __call__(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float, epoch: Hashable
    ) -> tuple[Tensor, Tensor | None]:
        """Do what the ensemble's `forward_decoder` does for `tokens`, int64 `[B*M, length]`."""

        def step(inputs: Any) -> Any:
            last, self._positions, divisor = inputs
            return self.ensemble.forward_decoder(last, encoder_outs, incremental_states, divisor)

        # The number of earlier tokens is a Python number in the host, and would be baked in. The temperature, which
        # code of the user's may change between two steps, is: a replay needs an equal one.
        positions = [
            None if embed is None else embed(tokens, incremental_state=state)
            for embed, state in zip(self._embed, incremental_states, strict=True)
        ]
        result: tuple[Tensor, Tensor | None] = self.replayer(step, [tokens[:, -1:], positions, temperature], epoch)
        return result

    def see(self, encoder_outs: Any, multiple: int | None = None) -> None:
        """Project the encoder output before the first step, as that waits to know whether anything is padding.

        `multiple`: pad it to a multiple of so many positions and always mask it, so that later calls fit.
        """
        for model, outputs in zip(self.ensemble.models, encoder_outs, strict=False):
            source, padding = source_of(outputs)
            if source is not None and multiple is not None:
                if padding is None:
                    padding = torch.zeros(source.shape[1::-1], dtype=torch.bool, device=source.device)
                more = -len(source) % multiple
                source = F.pad(source, (0, 0, 0, 0, 0, more))
                padding = F.pad(padding.bool(), (0, more), value=True)
                self._padding.append(padding)
            for layer in layers_of(model.decoder):
                if layer.encoder_attn is not None:
                    layer.encoder_attn.see(source, padding, is_masked=multiple is not None)

    def _of_tensors(self, decoder: Any, number: int) -> Any:
        """A view of the decoder that does not ask whether any token is padding, which the tree hides in any case."""
        if has_streams(decoder):  # it does not ask
            return replaced(decoder, embed_positions=lambda *_, **__: self._positions[number])

        def extract_features(tokens: Tensor, encoder_out: Any = None, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            source, padding = source_of(encoder_out) if encoder_out is not None else (None, None)
            x = decoder.embed_scale * decoder.embed_tokens(tokens)
            for module in (decoder.quant_noise, decoder.project_in_dim):
                x = x if module is None else module(x)
            positions = self._positions[number]
            x = x if positions is None else x + positions
            x = x if decoder.layernorm_embedding is None else decoder.layernorm_embedding(x)
            x = decoder.dropout_module(x).transpose(0, 1)  # [1, B*M, C]
            weights = None
            for place, layer in enumerate(layers_of(decoder)):
                is_last = place == decoder.num_layers - 1
                x, its, _ = layer(x, source, padding, {}, need_attn=is_last, need_head_weights=is_last)
                weights = its if is_last else weights
            x = x if decoder.layer_norm is None else decoder.layer_norm(x)
            x = x.transpose(0, 1)
            x = x if decoder.project_out_dim is None else decoder.project_out_dim(x)
            return x, {"attn": [None if weights is None else weights.float().to(x).mean(dim=0)]}

        return replaced(decoder, extract_features=extract_features)


def source_of(encoder_out: Any) -> tuple[Any, Any]:
    """The encoder output `[N, B, C]` and the padding mask `[B, N]`, each of which may be None."""
    return next(iter(encoder_out["encoder_out"]), None), next(iter(encoder_out["encoder_padding_mask"]), None)
