"""The ProphetNet model for fairseq, with options and architectures under the published names."""

from __future__ import annotations

import argparse
import copy
from typing import Any

from fairseq import utils
from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from fastgen.models.prophetnet.checkpoints import load_pretrained
from fastgen.models.prophetnet.decoder import NgramTransformerDecoder
from fastgen.models.prophetnet.encoder import ProphetNetEncoder

_POSITIONS = 512  # if a checkpoint does not say
# Options of fairseq's Transformer that are the same in every ProphetNet.
_FIXED = {
    **{f"{side}_{name}": value for side in ("encoder", "decoder")
       for name, value in (("learned_pos", True), ("normalize_before", False), ("layerdrop", 0.0))},
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "no_token_positional_embeddings": False,
    "adaptive_softmax_cutoff": None,
    "cross_self_attention": False,
}  # fmt: skip


@register_model("ngram_transformer_prophet")
class NgramTransformerProphetModel(FairseqEncoderDecoderModel):
    """ProphetNet: an encoder and a decoder with n-gram self-attention."""

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of published checkpoints to the parser."""
        parser.add_argument("--ngram", type=int, help="tokens that are predicted at each position")
        parser.add_argument("--num_buckets", type=int, help="buckets of relative positions")
        parser.add_argument("--relative_max_distance", type=int, help="distance from which on all are in one bucket")
        parser.add_argument("--activation-fn", choices=utils.get_available_activation_fns())
        for name in ("dropout", "attention-dropout", "activation-dropout"):
            parser.add_argument(f"--{name}", type=float, metavar="P")
        for side in ("encoder", "decoder"):
            for name in ("embed-dim", "ffn-embed-dim", "layers", "attention-heads"):
                parser.add_argument(f"--{side}-{name}", type=int, metavar="N")
        parser.add_argument("--share-all-embeddings", action="store_true", help="one embedding on both sides")
        parser.add_argument("--load-from-pretrained-model", help="checkpoint to begin with")
        parser.add_argument("--load-sep", action="store_true", help="begin with the embedding of [SEP] for [X_SEP]")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> NgramTransformerProphetModel:
        """Make a model, with the weights of `--load-from-pretrained-model` if that is given.

        Raises ValueError if embeddings are to be shared and cannot be.
        """
        base_architecture(args)
        if args.ngram < 1:
            raise ValueError(f"--ngram {args.ngram} is not 1 or more.")
        for name in ("max_source_positions", "max_target_positions"):
            if getattr(args, name, None) is None:
                setattr(args, name, _POSITIONS)
        source, target = task.source_dictionary, task.target_dictionary
        if args.share_all_embeddings:
            if source != target:
                raise ValueError("--share-all-embeddings needs one dictionary for both sides.")
            if args.encoder_embed_dim != args.decoder_embed_dim:
                raise ValueError("--share-all-embeddings needs --encoder-embed-dim to equal --decoder-embed-dim.")
            args.share_decoder_input_output_embed = True
        read = nn.Embedding(len(source), args.encoder_embed_dim, source.pad())
        written = read if args.share_all_embeddings else nn.Embedding(len(target), args.decoder_embed_dim, target.pad())
        config = _config(args)
        model = cls(ProphetNetEncoder(config, source, read), NgramTransformerDecoder(config, target, written))
        model.apply(init_bert_params)
        if path := getattr(args, "load_from_pretrained_model", None):
            load_pretrained(model, path, args.load_sep)
            args.load_from_pretrained_model = None  # checkpoints saved from now on hold the weights
        return model


def _config(args: Any) -> Any:
    """fairseq's configuration of both sides, with `ngram`, `num_buckets` and `relative_max_distance` in it."""
    args = copy.copy(args)
    vars(args).update(_FIXED, decoder_input_dim=args.decoder_embed_dim, decoder_output_dim=args.decoder_embed_dim)
    return TransformerConfig.from_namespace(args)


def _default(args: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))


def _sizes(embed_dim: int, ffn_embed_dim: int, attention_heads: int, layers: int) -> dict[str, int]:
    sizes = {
        "embed_dim": embed_dim, "ffn_embed_dim": ffn_embed_dim, "attention_heads": attention_heads, "layers": layers
    }  # fmt: skip
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}


@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet")
def base_architecture(args: Any) -> None:
    _default(args, ngram=2, num_buckets=32, relative_max_distance=128)
    _default(args, activation_fn="relu", dropout=0.1, attention_dropout=0.0, activation_dropout=0.0)
    _default(args, **_sizes(512, 2048, 8, 6))
    _default(args, share_decoder_input_output_embed=False, share_all_embeddings=False, load_sep=False)


@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet_base")
def transformer_base(args: Any) -> None:
    _default(args, activation_fn="gelu", attention_dropout=0.1, activation_dropout=0.1)
    _default(args, **_sizes(768, 3072, 12, 6))
    _default(args, share_decoder_input_output_embed=True, share_all_embeddings=True)
    base_architecture(args)


@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet_middle")
def transformer_middle(args: Any) -> None:
    _default(args, **_sizes(1024, 4096, 16, 6))
    transformer_base(args)


@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet_large")
def transformer_big(args: Any) -> None:
    _default(args, encoder_layers=12, decoder_layers=12)
    transformer_middle(args)
