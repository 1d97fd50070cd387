"""Stand-ins for the models of the host's search, which run the same models over the tree."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fastgen import config, phases
from fastgen.cache.slim.latent import Choice, Slim, identity_of
from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.fairseq.cache.slim import plan_for, slim_of
from fastgen.optimizer.fairseq.foreign_code import called_one_by_one, layers_of
from fastgen.optimizer.fairseq.generate.shortlist import Shortlist, unnormalised
from fastgen.optimizer.fairseq.model.attention import Shared, TreeCrossAttention, TreeSelfAttention
from fastgen.optimizer.fairseq.model.encoder import with_own_products
from fastgen.optimizer.fairseq.model.session import Session
from fastgen.optimizer.fairseq.model.streams import TreeStreamAttention, attends_in_streams, has_streams
from fastgen.optimizer.fairseq.model.views import replaced, standing_in, with_layers, with_products
from fastgen.optimizer.fairseq.model.wide import tree_class
from fastgen.optimizer.fairseq.replay.guards import guards_of_steps
from fastgen.optimizer.fairseq.replay.step_state import State
from fastgen.optimizer.fairseq.replay.steps import ReplayedSteps, replayer_for, source_of
from fastgen.optimizer.fairseq.request import Request, calls_back, foldable_language_model, is_interrupted
from fastgen.replay import store
from fastgen.replay.recorded_call import RecordedCall
from fastgen.replay.replayer import Replayer
from fastgen.report import FallbackError

_PROMPT_LOGITS = 2**24  # logits computed at a time: all positions of long prompts would take gigabytes


class StandIn:
    """Replaces the generator's `model`: the encoder output keeps one row per sentence.

    All other attributes are those of the host's ensemble.
    """

    def __init__(self, request: Request, shortlist: Shortlist | None) -> None:
        self.inner, self.shortlist = request.generator.model, shortlist
        self.reason: str | None = None  # why the tree turned out not to fit; then the host's own cache is used
        self._batch = request.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @phases.marked(phases.ENCODER)
    def forward_encoder(self, net_input: dict[str, Any]) -> Any:
        try:
            with arena.of(self.inner.models[0]):
                outputs = with_own_products(self.inner).forward_encoder(net_input)
        finally:
            arena.settle()  # the activations are free now
        if self.inner.has_encoder():
            self.reason = _misfit(outputs, self._batch)
        if self.reason and config.current().strict:
            raise FallbackError(self.reason)
        return outputs

    @phases.marked(phases.CACHE)
    def reorder_encoder_out(self, encoder_outs: Any, new_order: Tensor) -> Any:
        if self.reason:
            return self.inner.reorder_encoder_out(encoder_outs, new_order)
        return encoder_outs if self.inner.has_encoder() else []


class TreeEnsemble(StandIn):
    """Replaces the generator's `model` in one call: decoder steps run over the tree, reordering edits the ancestry."""

    def __init__(self, request: Request, shortlist: Shortlist | None) -> None:
        super().__init__(request, shortlist)
        source = request.source
        assert source is not None
        self._device = source.device
        self.replayer, self.request = replayer_for(request), request
        self.choice, self.plan = plan_for(request, source)  # which caches are slim, and why
        buffers, is_static = Buffers(self.inner.models[0]), self.replayer is not None
        make = tree_class(request, self.choice)
        tree = make(request.batch, request.beams, request.max_steps, buffers, is_static)
        in_streams = any(has_streams(model.decoder) for model in self.inner.models)
        self.session = Session(tree, None if in_streams else request.generator.pad, source.device)
        self._products = products_for(request)
        models = self._views()
        own = [layer.self_attn.slim for model in models for layer in layers_of(model.decoder)]
        self._own_caches = tuple(map(identity_of, own))  # a recording fits only if these are equal
        self._over_the_tree = self._shown(models)
        # If code between the steps may put in other modules: those that the views are of.
        self._viewed = _modules_of(self.inner) if calls_back(request) else None
        self._replayed = ReplayedSteps(self._over_the_tree, self.replayer) if self.replayer else None
        self._recorded: RecordedCall | None = None  # if it may share captured steps with other calls
        self._search: tuple[Hashable, FairseqBeamSearch] | None = None
        self._width: int | None = None  # positions of the source
        self.encoded: Any = None  # encoder output that our loop leaves to the host's
        self._prompt: Prompt | None = None
        self._arena = arena.of(self.inner.models[0])
        if not self.inner.has_encoder() and request.generator.lm_model is None:
            self._prompt = self._read_prompt(request, models)
        self.session.begin_decoding()
        if self._replayed is not None and not self.inner.has_encoder():
            self._take_up([])

    def _views(self) -> list[Any]:
        """Views of the models, whose decoders run over the tree."""
        return [
            standing_in(model, decoder=over_the_tree(model.decoder, self.session, self.choice, self._products))
            for model in self.inner.models
        ]

    def _shown(self, models: list[Any]) -> Any:
        """A view of the ensemble with these views in it, which return what the shortlist takes, if there is one."""
        shown = models if self.shortlist is None else [unnormalised(models[0])]
        # Without modules: what is kept with a recording must not keep the model alive.
        return replaced(self.inner, models=shown, single_model=shown[0], _modules={})

    def _follow(self) -> None:
        """View the models anew if code between the steps has put other modules into them; keys and values stay."""
        modules = _modules_of(self.inner)
        if self._viewed is None or [*map(id, modules)] == [*map(id, self._viewed)]:
            return
        self._viewed = modules
        before = self._over_the_tree if self._replayed is None else self._replayed.ensemble
        self._over_the_tree = self._shown(self._views())
        for new, old in zip(self._over_the_tree.models, before.models, strict=True):
            for mine, its in zip(layers_of(new.decoder), layers_of(old.decoder), strict=False):
                mine.self_attn.layer = its.self_attn.layer
                if mine.encoder_attn is not None and its.encoder_attn is not None:
                    mine.encoder_attn.source = its.encoder_attn.source
        if self._replayed is not None and self.replayer is not None:
            self._replayed = ReplayedSteps(self._over_the_tree, self.replayer)

    @staticmethod
    @phases.marked(phases.PREFILL)
    def _read_prompt(request: Request, models: list[Any]) -> Prompt | None:
        prefix = request.shared_prefix()
        if not prefix or calls_back(request) or called_one_by_one(request.generator.model):
            return None
        assert request.prefix_tokens is not None
        forced = request.prefix_tokens[:, :prefix]
        start = torch.full_like(forced[:, :1], request.start)
        return Prompt(models, torch.cat([start, forced], dim=1))

    @phases.marked(phases.ENCODER)
    def forward_encoder(self, net_input: dict[str, Any]) -> Any:
        if self.encoded is not None:
            outputs, self.encoded = self.encoded, None
            return outputs
        outputs = super().forward_encoder(net_input)
        if self._replayed is not None and self.inner.has_encoder() and not self.reason:
            self._take_up(outputs)
        return outputs

    def _take_up(self, encoder_outs: Any) -> None:
        """Take over captured steps of an earlier call, if there are some for these shapes."""
        assert self._replayed is not None and self.replayer is not None
        # A fused language model runs over the same tree.
        may_share = self.request.generator.lm_model is None
        self._width = len(source_of(encoder_outs[0])[0]) if encoder_outs else None
        self._replayed.see(encoder_outs, store.SOURCE_STEP if may_share else None)
        if not may_share:
            return
        self._recorded = RecordedCall(self.owner, self.replayer, self._device)
        reused = self._recorded.reuse(self._state(), self._how())
        if not self._recorded.may_share:
            return
        if reused is not None:
            self.session, self._replayed = reused.session, reused.replayed
            self._products, self._search = reused.products, reused.search
            self._replayed.replayer = self.replayer
        self._recorded.retain_buffers(self.session.tree)

    def search(self, policy: CollectingPolicy) -> FairseqBeamSearch:
        """The search of our loop, perhaps one kept from an earlier call, with captured steps."""
        request, replayer = self.request, self.replayer
        tokens = {"start": request.start, "end": request.generator.eos, "pad": request.generator.pad}
        if replayer is not None:
            replayer = replayer.another()
        key = (request.batch, request.beams, policy, *tokens.values())
        if self._search is not None and self._search[0] == key and replayer is not None:
            self._search[1].restart(replayer)
        else:
            arguments = (request.batch, request.beams, policy)
            self._search = key, FairseqBeamSearch(*arguments, **tokens, device=self._device, replayer=replayer)
        return self._search[1]

    def store_graph(self) -> None:
        """Keep the captured steps of this call, which has succeeded, for later calls."""
        if self._recorded is not None:
            models = self.inner.models
            self._recorded.store(self.session.tree, self._state(), self._how(), lambda: guards_of_steps(models))

    def _shrink(self, replayer: Replayer) -> None:
        """Note that sentences leave: steps captured so far do not fit any more."""
        tree = self.session.tree
        if self._recorded is not None and tree.retained.is_on and not tree.evictions:
            self._recorded.has_room_for_two(tree, self._state(), self._search and self._search[1])
        replayer.shrink()

    def close(self) -> None:
        """Free all keys and values."""
        if self.replayer is not None:
            self.replayer.close()
        if self._recorded is None or not self._recorded.is_stored:
            self.session.tree.close()

    @property
    def owner(self) -> torch.nn.Module:
        """The module that keeps recordings: the model or, if there are several, the generator's ensemble."""
        models = self.inner.models
        owner: torch.nn.Module = models[0] if len(models) == 1 else self.inner
        return owner

    def _state(self) -> State:
        assert self._replayed is not None
        return State(self.session, self._replayed, self._products, self._search)

    def _how(self) -> Hashable:
        """A key that must be equal for calls that share captured steps, besides shapes and surroundings."""
        temperature, averaged = self.request.generator.temperature, type(self.inner).forward_decoder
        # The models in an ensemble may be exchanged while other code holds on to the old ones.
        models = tuple(map(id, self.inner.models))
        rest = self.shortlist is None, self._own_caches, calls_back(self.request)
        return temperature, averaged, models, *rest

    @phases.marked(phases.CACHE)
    def reorder_incremental_state(self, incremental_states: Any, new_order: Tensor) -> None:
        if self.reason:
            self.inner.reorder_incremental_state(incremental_states, new_order)
            return
        if self.replayer is not None and len(new_order) < self.session.tree.batch * self.session.tree.beams:
            self._shrink(self.replayer)
        stay = self.session.reorder(new_order)
        if stay is not None and self._prompt is not None:
            self._prompt.select(stay)

    @phases.marked(phases.PASS)
    def forward_decoder(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        if self.reason:
            return self.inner.forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        position = tokens.shape[1] - 1
        if self._prompt is not None:
            if position < self._prompt.length:
                scores = self._prompt.log_probs(position, temperature)  # [B, V]
                if self.shortlist is not None:
                    return self.shortlist.of_prompt(position, scores, position < self._prompt.length - 1), None
                return scores.repeat_interleave(self.session.tree.beams, dim=0), None
            self._prompt = None
        if self._viewed is not None:
            self._follow()
        self.session.advance(tokens[:, -1])
        with self._arena:
            if self._replayed is None:
                scores, weights = self._over_the_tree.forward_decoder(
                    tokens, encoder_outs, incremental_states, temperature
                )
            else:
                scores, weights = self._replayed(
                    tokens, encoder_outs, incremental_states, temperature, self.session.tree.epoch
                )
                weights = weights if weights is None else weights[:, : self._width]
        return scores if self.shortlist is None else self.shortlist.of(tokens, scores), weights


class TreeLanguageModel:
    """Replaces the fused language model: reads one token in each step instead of all tokens again."""

    def __init__(self, inner: Any, ensemble: TreeEnsemble) -> None:
        self.inner, self._ensemble = inner, ensemble
        self._decoder = over_the_tree(inner.decoder, ensemble.session, ensemble.choice, products_for(ensemble.request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, tokens: Tensor) -> Any:
        if self._ensemble.reason:
            return self.inner(tokens)
        return self._decoder(tokens, incremental_state={})


class Prompt:
    """The forced prefix of decoder-only models, which is read in one pass, once per sentence."""

    def __init__(self, models: list[Any], tokens: Tensor) -> None:
        """`models`: views that run over the tree; `tokens`: int64 `[B, P]`, without padding."""
        self.length = tokens.shape[1]
        self._models = models
        self._features = [model.decoder.extract_features(tokens, None)[0] for model in models]  # each [B, P, C]
        vocabulary = max(len(model.decoder.dictionary) for model in models)
        self._positions = max(1, _PROMPT_LOGITS // (tokens.shape[0] * vocabulary))
        self._first, self._chunk = 0, tokens.new_empty(0, 0, 0)  # log-probabilities [B, positions, V] from `first` on
        self._temperature = 1.0  # that they are made with

    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these, int64 `[B']`."""
        self._features = [features.index_select(0, sentences) for features in self._features]
        self._chunk = self._chunk.index_select(0, sentences)

    @phases.marked(phases.PREFILL)
    def log_probs(self, position: int, temperature: float) -> Tensor:
        """Log-probabilities of the token after `position`, averaged over the models as the host does, `[B, V]`."""
        if position >= self._first + self._chunk.shape[1] or temperature != self._temperature:
            self._first, self._temperature = position, temperature
            self._chunk = self._compute(slice(position, position + self._positions), temperature)
        return self._chunk[:, position - self._first]

    def _compute(self, positions: slice, temperature: float) -> Tensor:
        each = []
        for model, features in zip(self._models, self._features, strict=True):
            logits = model.decoder.output_layer(features[:, positions]) / temperature
            each.append(model.get_normalized_probs((logits, None), log_probs=True, sample=None))
        if len(each) == 1:
            return each[0]
        return torch.logsumexp(torch.stack(each), dim=0) - math.log(len(each))


def _modules_of(ensemble: Any) -> list[torch.nn.Module]:
    return [module for model in ensemble.models for module in model.decoder.modules()]


def products_for(request: Request) -> LinearDispatcher:
    """The dispatcher of linear layers for one decoder in one call."""
    products = LinearDispatcher.configured()
    if calls_back(request) or is_interrupted(request):
        products.expect_edits()
    return products


def over_the_tree(decoder: Any, session: Session, choice: Choice, products: LinearDispatcher) -> Any:
    """A view of the decoder with attention over the session's tree and with our products; the decoder is not changed.

    `choice`: which caches of the decoder are slim.
    """
    shared = Shared()
    layers = []

    def slim_for(module: Any, kind: str) -> Slim | None:
        if (slim := slim_of(module, kind)) is not None:
            products.exclude_from_fusion(module.k_proj)
            products.exclude_from_fusion(module.v_proj)
        return slim

    for layer in layers_of(decoder):
        module = layer.self_attn
        kind = TreeStreamAttention if attends_in_streams(module) else TreeSelfAttention
        own = kind(with_products(module, products), session, slim_for(module, choice.self_attn))
        attention: dict[str, Any] = {"self_attn": own}
        if (module := layer.encoder_attn) is not None:
            slim = slim_for(module, choice.cross_attn)
            attention["encoder_attn"] = TreeCrossAttention(with_products(module, products), session, shared, slim)
        layers.append(replaced(with_products(layer, products), **attention))
    view = replaced(with_products(decoder, products), layers=with_layers(decoder, layers))
    # On a device the host would wait in each step to know whether any token is padding. With this it masks padding
    # without asking, and the tree, which hides it in any case, does not read the mask.
    return view if session.device.type == "cpu" else replaced(view, cross_self_attention=True)


def _misfit(encoder_outs: Any, batch: int) -> str | None:
    """Why the tree's cross-attention can't use these encoder outputs; None if it can."""
    for output in encoder_outs:
        if not isinstance(output, dict) or not {"encoder_out", "encoder_padding_mask"} <= output.keys():
            return "its encoder returns something else than fairseq's Transformer encoder"
        states, masks = output["encoder_out"], output["encoder_padding_mask"]
        if len(states) != 1 or states[0].ndim != 3 or states[0].shape[1] != batch:
            return "its encoder does not return one row per sentence"
        if len(masks) > 1 or any(mask is not None and mask.shape != states[0].shape[1::-1] for mask in masks):
            return "its encoder's padding mask is not one row per sentence"
    return None


def decode_over_the_tree(request: Request, generator: Any, shortlist: Shortlist | None) -> TreeEnsemble:
    """Give `generator`, a view of the request's own, models that run over the tree."""
    ensemble = TreeEnsemble(request, shortlist)
    generator.__dict__["model"] = ensemble
    if foldable_language_model(request):
        generator.__dict__["lm_model"] = TreeLanguageModel(request.generator.lm_model, ensemble)
    return ensemble
