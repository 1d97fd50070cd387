"""Tiny random models of fairseq's architectures, and batches for them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq_weights import weights_of
from torch import Tensor

import fastgen
import fastgen.models.prophetnet

PAD, EOS, UNK = 1, 2, 3
ENDS = 1.8  # how much larger the end token's weights are: sentences end at different steps
WORDS = 37  # beside the four special tokens
_SIZES: dict[str, Any] = dict(
    encoder_embed_dim=32, encoder_ffn_embed_dim=48, encoder_layers=2, encoder_attention_heads=4,
    decoder_embed_dim=32, decoder_ffn_embed_dim=48, decoder_layers=3, decoder_attention_heads=4,
    decoder_output_dim=32, decoder_input_dim=32, max_source_positions=64, max_target_positions=64,
    tokens_per_sample=64, criterion="cross_entropy", dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip
# Name -> architecture and what else it is given.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "post-norm": ("transformer", {}),
    "pre-norm": ("transformer", dict(encoder_normalize_before=True, decoder_normalize_before=True)),
    "learned": ("transformer", dict(encoder_learned_pos=True, decoder_learned_pos=True)),
    "no-positions": ("transformer", dict(no_token_positional_embeddings=True)),
    "shared": ("transformer", dict(share_all_embeddings=True)),
    "adaptive": ("transformer", dict(adaptive_softmax_cutoff="12,25", adaptive_softmax_dropout=0.0)),
    "no-cross": ("transformer", dict(no_cross_attention=True)),
    "layernorm-embedding": ("transformer", dict(layernorm_embedding=True, no_scale_embedding=True)),
    "align": ("transformer_align", dict(alignment_layer=1, alignment_heads=2, full_context_alignment=False)),
    "align-full": ("transformer_align", dict(alignment_layer=1, alignment_heads=2, full_context_alignment=True)),
    "iwslt": ("transformer_iwslt_de_en", {}),
    "wmt": ("transformer_wmt_en_de", {}),
    "wmt-big": ("transformer_wmt_en_de_big_t2t", {}),
    "bart": ("bart_base", dict(pooler_dropout=0.0)),
    "mbart": ("mbart_large", dict(pooler_dropout=0.0)),
    "m2m": ("transformer_wmt_en_de_big", dict(encoder_normalize_before=True, decoder_normalize_before=True)),
    "prophetnet": (
        "ngram_transformer_prophet_base",
        dict(ngram=3, num_buckets=8, relative_max_distance=12, share_all_embeddings=False),
    ),
    "lm": ("transformer_lm", {}),
    "lm-gpt": ("transformer_lm_gpt", {}),
    "lm-adaptive": ("transformer_lm", dict(adaptive_softmax_cutoff="12,25", adaptive_softmax_dropout=0.0)),
    "lightconv": ("lightconv_iwslt_de_en", dict(encoder_kernel_size_list=[3, 3], decoder_kernel_size_list=[3, 3, 3])),
    "fconv": (
        "fconv_iwslt_de_en",
        dict(encoder_layers="[(32, 3)] * 2", decoder_layers="[(32, 3)] * 2", decoder_out_embed_dim=32),
    ),
    "lstm": ("lstm", dict(encoder_layers=1, decoder_layers=1)),
}
TRANSLATORS = [name for name in _KINDS if not name.startswith("lm") and name not in ("lightconv", "fconv", "lstm")]
LANGUAGE_MODELS = [name for name in _KINDS if name.startswith("lm")]


@functools.cache
def dictionary() -> Dictionary:
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(f"w{number}")
    assert (words.pad(), words.eos(), words.unk()) == (PAD, EOS, UNK)
    return words


@functools.cache
def load(name: str, seed: int = 0) -> Any:
    """The model called `name`, with random weights large enough that beams cross and scores differ."""
    architecture, options = _KINDS[name]
    kind, words = ARCH_MODEL_REGISTRY[architecture], dictionary()
    args = _defaults(kind)
    vars(args).update(_SIZES, **options, arch=architecture)
    ARCH_CONFIG_REGISTRY[architecture](args)
    for field in dataclasses.fields(getattr(kind, "__dataclass", None) or _NoFields):
        default = field.default
        if not hasattr(args, field.name):  # defaults like "${common.tpu}" refer to other options, all of them off
            setattr(args, field.name, None if isinstance(default, str) and default.startswith("$") else default)
    task = Namespace(source_dictionary=words, target_dictionary=words, dictionary=words, args=args)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed + 1)
        model = kind.build_model(args, task)
        for _, parameter in weights_of(model):
            if parameter.dim() > 1:
                parameter.normal_(0, 0.35)
            if len(parameter) == len(words):
                parameter[EOS] *= ENDS
    return model.eval()


def changed(change: Callable[[Any], object], name: str = "post-norm") -> Any:
    """A copy of the model called `name`, after `change`."""
    model = copy.deepcopy(load(name))
    change(model)
    return model


def _defaults(kind: Any) -> Namespace:
    """What the command line gives a model of this kind when no option is set."""
    parser = ArgumentParser(allow_abbrev=False)
    kind.add_args(parser.add_argument_group(argument_default=SUPPRESS))
    return parser.parse_args([])


@dataclasses.dataclass
class _NoFields:
    pass


def forget_beams(models: Sequence[Any]) -> None:
    """What stock's generators write into BART is gone: each reference is that of a model fresh from disk."""
    for model in models:
        for module in model.modules():
            if getattr(module, "beam_size", 1) != 1:
                module.beam_size = 1
        vars(getattr(model, "encoder", model)).pop("reorder_encoder_out", None)


def batch(
    lengths: Sequence[int] = (9, 5, 12, 7), left: bool = True, seed: int = 3, first_id: int = 0
) -> dict[str, Any]:
    """Source sentences of these many words and an end, padded on the left as fairseq does, or on the right."""
    random = torch.Generator().manual_seed(seed)
    width = max(lengths) + 1
    rows = torch.full((len(lengths), width), PAD)
    for row, length in zip(rows, lengths, strict=True):
        words = torch.cat([torch.randint(4, 4 + WORDS, (length,), generator=random), torch.tensor([EOS])])
        row[slice(width - length - 1, width) if left else slice(0, length + 1)] = words
    ids = torch.arange(first_id, first_id + len(lengths))
    inputs = {"src_tokens": rows, "src_lengths": rows.ne(PAD).sum(1), "prev_output_tokens": rows[:, :1]}
    return {"id": ids, "nsentences": len(lengths), "net_input": inputs, "target": None}


def staggered(count: int) -> tuple[dict[str, Any], Tensor]:
    """Sentences of several lengths, and prefixes that end every second one at a step of its own."""
    prefix = torch.full((count, 2 + count // 2), PAD)
    for number in range(0, count, 2):
        end = 1 + number // 2
        prefix[number, :end] = torch.arange(4, 4 + end)
        prefix[number, end] = EOS
    return batch([3 + number * 5 % 13 for number in range(count)]), prefix


def prompts(lengths: Sequence[int] = (6, 6, 6), seed: int = 5) -> dict[str, Any]:
    """Beginnings for a language model, padded on the right."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(4, 4 + WORDS, (length,), generator=random)
    inputs = {"src_tokens": rows, "src_lengths": rows.ne(PAD).sum(1)}
    return {"id": torch.arange(len(lengths)), "nsentences": len(lengths), "net_input": inputs}


def generate(
    names: str | Sequence[str] | Any,
    sample: dict[str, Any],
    prefix: Tensor | None = None,
    constraints: Tensor | None = None,
    bos: int | None = None,
    align: bool = False,
    **options: Any,
) -> list[list[dict[str, Any]]]:
    """What a new SequenceGenerator returns; `names` of models, or models. Options are the generator's."""
    names = names if isinstance(names, (list, tuple)) else [names]
    models = [load(name) if isinstance(name, str) else name for name in names]
    if not fastgen.status().enabled:
        forget_beams(models)
    strategy = options.pop("strategy", None)
    options = {"beam_size": 4, "max_len_b": 14, **options}
    if strategy is not None:
        options["search_strategy"] = strategy(dictionary())
    kind = SequenceGeneratorWithAlignment if align else SequenceGenerator
    generator = kind(models, dictionary(), **options)
    return generator.generate(models, sample, prefix_tokens=prefix, constraints=constraints, bos_token=bos)


def prompted(
    names: Any, sample: dict[str, Any] | None = None, prefix: Tensor | None = None, **options: Any
) -> list[list[dict[str, Any]]]:
    """What fairseq's language modelling task makes of a batch of prompts."""
    sample = prompts() if sample is None else sample
    prefix = sample["net_input"]["src_tokens"] if prefix is None else prefix
    return generate(names, sample, prefix=prefix, bos=EOS, **options)
