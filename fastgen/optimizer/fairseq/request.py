"""The arguments of one call of `SequenceGenerator._generate`, and why it may have to be left to the host."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from fairseq import search, sequence_generator
from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import EnsembleModel, EnsembleModelWithAlignment
from torch import Tensor

from fastgen.decoding.trie import Trie
from fastgen.optimizer import verification
from fastgen.optimizer.fairseq import foreign_code
from fastgen.optimizer.fairseq.model import streams
from fastgen.patching.foreign_code import active_mode
from fastgen.patching.replaced_code import are_interrupted

_ENSEMBLES = (EnsembleModel, EnsembleModelWithAlignment)
_STRATEGIES = tuple(
    getattr(search, name)
    for name in """BeamSearch DiverseBeamSearch DiverseSiblingsSearch LengthConstrainedBeamSearch
    LexicallyConstrainedBeamSearch PrefixConstrainedBeamSearch Sampling""".split()
)
# Methods of the host whose rules our loop follows. A generator with other ones runs them, in the compat tier.
_RULES = ("_prefix_tokens", "replicate_first_beam", "finalize_hypos", "is_finished")
_SOURCES = ("src_tokens", "source", "features")  # in the order in which the host looks for them
_DECODER_METHODS = ("forward", "extract_features", "extract_features_scriptable", "output_layer")


@dataclass
class Request:
    """The arguments of `_generate`, under the host's names."""

    generator: Any
    sample: dict[str, Any]
    prefix_tokens: Tensor | None  # int64 [B, prefix]
    constraints: Tensor | None
    bos_token: int | None

    @property
    def beams(self) -> int:
        return int(self.generator.beam_size)

    @property
    def start(self) -> int:
        """The token that every hypothesis starts with."""
        return int(self.generator.eos if self.bos_token is None else self.bos_token)

    @property
    def source(self) -> Tensor | None:
        """The input of the encoder, `[B, N]` or `[B, N, features]`; for a language model, the prompt."""
        inputs = self.sample["net_input"]
        return next((inputs[name] for name in _SOURCES if name in inputs), None)

    @property
    def batch(self) -> int:
        return 0 if self.source is None else int(self.source.shape[0])

    def inputs_of(self, sentences: slice) -> dict[str, Any]:
        """The models' inputs for some sentences of the batch."""
        return {
            name: value[sentences] if torch.is_tensor(value) and value.shape[:1] == (self.batch,) else value
            for name, value in self.sample["net_input"].items()
        }

    @property
    def model_name(self) -> str:
        return type(getattr(self.generator.model, "single_model", self.generator.model)).__name__

    @property
    def max_steps(self) -> int:
        """The most decoder steps the host's loop can take."""
        assert self.source is not None
        generator, length = self.generator, int(self.source.shape[1])
        if generator.match_source_len:
            inputs = self.sample["net_input"]
            lengths = inputs.get("src_lengths")
            if lengths is None and (tokens := inputs.get("src_tokens")) is not None:
                lengths = (tokens.ne(generator.eos) & tokens.ne(generator.pad)).sum(1)
            return (length if lengths is None else int(lengths.max())) + 1
        return min(int(generator.max_len_a * length + generator.max_len_b), int(generator.max_len) - 1) + 1

    def shared_prefix(self) -> int:
        """How many first columns of the prefix hold a token for every sentence, and no end token."""
        generator, prefix = self.generator, self.prefix_tokens
        if prefix is None or not prefix.shape[1]:
            return 0
        forced = prefix.ne(generator.pad) & prefix.ne(generator.eos)
        columns = int(forced.all(0).long().cumprod(0).sum())
        return min(columns, self.max_steps - 1)


def calls_back(request: Request) -> bool:
    """Whether code of the user's runs between two steps of the models.

    That is a function that a prefix-constrained search asks, unless it is our trie; a replaced method of the search or
    of the loop; or a fused language model with hooks.
    """
    generator, language_model = request.generator, request.generator.lm_model
    strategy = generator.search
    if type(strategy) is search.PrefixConstrainedBeamSearch and type(strategy.prefix_allowed_tokens_fn) is not Trie:
        return True
    if has_own_code(generator):
        return True
    return language_model is not None and are_interrupted(language_model.modules())


def is_interrupted(request: Request) -> bool:
    """Whether code of the user's runs between two layers, or in place of one."""
    models = [*request.generator.model.models, request.generator.lm_model]
    return are_interrupted(module for model in models if model is not None for module in model.modules())


def unsupported_reason(request: Request) -> str | None:
    """Why this request has to be left to the host's own cache, in words for the user; None if it need not."""
    generator = request.generator
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if reason := verification.reason_against(next(iter(getattr(generator.model, "models", ())), None)):
        return reason
    if (mode := active_mode()) is not None:
        return f"a mode of yours ({mode}) sees each operation"
    if type(generator.model) not in _ENSEMBLES:
        return f"the models are held by {type(generator.model).__name__}, not by fairseq's EnsembleModel"
    if was_changed(generator.model):
        return "the models of the ensemble were exchanged after it was made"
    if request.source is None or request.source.numel() == 0:
        return "the batch is empty"
    if _has_padding_alone(request):
        return "a source is padding alone, where the host's scores are NaN"
    strategy = generator.search
    if type(strategy) not in _STRATEGIES:
        return f"the search strategy {type(strategy).__name__} has not been proven"
    if isinstance(strategy, search.Sampling) and strategy.sampling_topp > 0:
        return "top-p sampling cuts off within rounding errors: which tokens are left is stock's to say"
    if torch.is_tensor(request.bos_token) and request.bos_token.numel() != 1:
        return "each hypothesis has a first token of its own"
    if request.start == generator.pad:
        return "the first token is padding"
    if not generator.model.has_incremental_states():
        return "the model keeps no state from step to step"
    for model in generator.model.models:
        if reason := unsupported_decoder(model.decoder):
            return reason
        if model.decoder.padding_idx != generator.pad:
            return "the model and the search disagree about the padding token"
    return foreign_code.unsupported_reason(generator.model)


def unsupported_decoder(decoder: Any) -> str | None:
    """Why this decoder cannot run over the tree, whatever the request; None if it can."""
    kind = type(decoder).__name__
    if not isinstance(decoder, TransformerDecoderBase):
        return f"{kind} is not fairseq's Transformer decoder"
    if name := own_method(decoder, streams.decoder_class(decoder), *_DECODER_METHODS):
        return f"{kind} has its own {name}"
    if decoder.training:
        return "the model is in training mode"
    if getattr(decoder, "cross_self_attention", False):
        return "its decoder attends to source and target at once (cross_self_attention)"
    if type(decoder.layers) not in foreign_code.CONTAINERS:
        return f"its layers are held by {type(decoder.layers).__name__}"
    for layer in foreign_code.layers_of(decoder):
        if reason := _unsupported_layer(layer, streams.attention_class(decoder)):
            return reason
    if any(getattr(module, "apply_during_inference", False) for module in decoder.modules()):
        return "dropout is kept during generation (retain_dropout)"
    if any(map(_drops, decoder.modules())):
        return "dropout in the decoder is in training mode"
    return None


def _drops(module: Any) -> bool:
    """Whether a module is in training mode, alone perhaps, and then drops a share `p` of something."""
    share = getattr(module, "p", None)
    return module.training and isinstance(share, (int, float)) and share > 0


def own_method(module: Any, base: type, *names: str) -> str | None:
    """The first of these methods that is not the method of `base`; None if all are."""
    own = (name for name in names if getattr(type(module), name) is not getattr(base, name) or name in vars(module))
    return next(own, None)


def is_own(thing: Any, home: ModuleType, name: str) -> bool:
    """Whether this method of an object of the host is the one that the host's module `home` defines.

    The module of the code decides: somebody may have replaced the method by one of the same name.
    """
    function = getattr(type(thing), name)
    return name not in vars(thing) and getattr(function, "__globals__", None) is vars(home)


def own_rule(generator: Any) -> str | None:
    """The first rule of the host's loop that the generator overrides; None if it overrides none."""
    return next((name for name in _RULES if not is_own(generator, sequence_generator, name)), None)


def has_own_search(generator: Any) -> bool:
    """Whether other code than the host's is in the search strategy, or in one that it uses."""
    return any(foreign_code.own_name(each) is not None for each in generator.search.modules())


def has_own_blocker(generator: Any) -> bool:
    """Whether other code than the host's bans n-grams."""
    blocker = generator.repeat_ngram_blocker
    return blocker is not None and (
        type(blocker) is not NGramRepeatBlock
        or foreign_code.own_name(blocker) is not None
        or bool(blocker._forward_hooks or blocker._forward_pre_hooks)
    )


def has_own_code(generator: Any) -> bool:
    """Whether other code than the host's chooses or bans tokens, which may give any token a score."""
    return bool(own_rule(generator)) or has_own_search(generator) or has_own_blocker(generator)


def _unsupported_layer(layer: Any, self_attention: Any) -> str | None:
    kind = type(layer).__name__
    if not isinstance(layer, TransformerDecoderLayerBase):
        return f"its layers are {kind}, not fairseq's Transformer layers"
    if own_method(layer, TransformerDecoderLayerBase, "forward"):
        return f"{kind} has its own forward"
    if getattr(layer, "onnx_trace", False):
        return "it is prepared for export to ONNX"
    for attention, known in ((layer.self_attn, self_attention), (layer.encoder_attn, MultiheadAttention)):
        if attention is not None and (reason := unsupported_attention(attention, known)):
            return reason
    return None


def unsupported_attention(attention: Any, known: Any = MultiheadAttention) -> str | None:
    """Why our attention cannot replace this module, which must be of the class `known`; None if it can."""
    kind = type(attention).__name__
    if type(attention) is not known or "forward" in vars(attention):
        return f"it computes attention with {kind} of its own"
    if getattr(attention, "use_xformers", False):
        return "it computes attention with xformers"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "its attention has keys that no token wrote (add_bias_kv, add_zero_attn)"
    if attention.onnx_trace:
        return "it is prepared for export to ONNX"
    if getattr(attention, "tpu", False):
        return "it is prepared for TPUs"
    if attention._forward_hooks or attention._forward_pre_hooks:
        return "hooks watch its attention"
    return None


def _has_padding_alone(request: Request) -> bool:
    """Whether the decoder would attend to a source of which nothing can be seen."""
    tokens, generator = request.source, request.generator
    if tokens is None or tokens.is_floating_point() or not generator.model.has_encoder():
        return False
    encoders = (model.encoder for model in generator.model.models)
    paddings = {getattr(encoder, "padding_idx", generator.pad) for encoder in encoders}  # by which they mask a source
    return any(bool(tokens.eq(pad).all(1).any()) for pad in paddings)


def was_changed(ensemble: Any) -> bool:
    """Whether the models are others than those that the host's ensemble was made of, and keeps further names for."""
    models = list(ensemble.models)
    return len(models) != ensemble.models_size or not models or models[0] is not ensemble.single_model


def has_own_scale(module: Any) -> bool:
    """Whether somebody has set a scale of attention, which the host ignores where it keeps no keys of earlier steps."""
    attentions = (each for each in module.modules() if isinstance(each, MultiheadAttention))
    return any(each.scaling != each.head_dim**-0.5 for each in attentions)


def foldable_language_model(request: Request) -> bool:
    """Whether the fused language model can run over the tree; if not, the host runs it as usual."""
    model = request.generator.lm_model
    return (
        model is not None
        and not calls_back(request)  # which may change the model, and the host reads all tokens anew in each step
        and type(model).forward is FairseqLanguageModel.forward
        and unsupported_decoder(model.decoder) is None
        and model.decoder.padding_idx == request.generator.pad
        and not has_own_scale(model.decoder)
        and foreign_code.unsupported_model(model) is None
        and foreign_code.watched(model, model.decoder) is None
        and foreign_code.own_name(model) is None
        and not are_interrupted([model])
    )


def is_diverse(request: Request) -> bool:
    return type(request.generator.search) is search.DiverseBeamSearch
