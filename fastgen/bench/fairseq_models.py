"""The same for fairseq: architectures with random weights, and the trained translation model."""

from __future__ import annotations

import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from fastgen.bench import data
from fastgen.bench.data import Folders

_SEED = 0
# Name here: architecture of fairseq, vocabulary, and what differs from the architecture's own sizes.
_ENDS = ("encoder", "decoder")


def _both(**sizes: int) -> dict[str, int]:
    return {f"{end}_{name}": size for end in _ENDS for name, size in sizes.items()}


_POSITIONS = {"max_source_positions": 1024, "max_target_positions": 1024}
ARCHITECTURES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bart-base": ("bart_base", 50264, _POSITIONS),
    "bart-large": ("bart_large", 50264, _POSITIONS),
    "transformer-base": ("transformer_wmt_en_de", 32000, _POSITIONS | {"share_all_embeddings": True}),
    "transformer-big": ("transformer_wmt_en_de_big", 32000, _POSITIONS | {"share_all_embeddings": True}),
    "transformer-wide": (
        "transformer",
        50264,
        _POSITIONS
        | {"share_all_embeddings": True}
        | _both(embed_dim=768, ffn_embed_dim=3072, layers=6, attention_heads=12),
    ),
    "prophetnet-large": ("ngram_transformer_prophet_large", 30522, {**_POSITIONS, "share_all_embeddings": True}),
    "gpt2": (
        "transformer_lm_gpt",
        50257,
        {
            "decoder_layers": 12,
            "decoder_attention_heads": 12,
            "decoder_embed_dim": 768,
            "decoder_ffn_embed_dim": 3072,
            "decoder_output_dim": 768,
            "decoder_input_dim": 768,
            "tokens_per_sample": 1024,
            "max_target_positions": 1024,
            "share_decoder_input_output_embed": True,
        },
    ),
}


@dataclass(frozen=True)
class Job:
    """Calls of `SequenceGenerator.generate`: its options, the inputs of each batch, and their prompts, if any."""

    model: Any
    words: Any
    options: dict[str, Any]
    batches: list[dict[str, Any]]
    prefixes: list[Any] = field(default_factory=list)


# The names of transformers' options that tasks use.
_NAMES = {"no_repeat_ngram_size": "no_repeat_ngram_size", "length_penalty": "len_penalty"}


def build(task: dict[str, Any], folders: Folders) -> Job:
    """The model and inputs of a task (as `Task.as_dict` gives it)."""
    import torch

    torch.manual_seed(_SEED)
    job = _translation(task, folders) if task["model"] == "ddtp" else _random(task)
    job.model.eval()
    job.options.update({_NAMES[name]: value for name, value in task["options"].items()})
    return job


def _random(task: dict[str, Any]) -> Job:
    import torch

    architecture, vocabulary, sizes = ARCHITECTURES[task["model"]]
    model, words = random_model(architecture, vocabulary, task["layers"], sizes)
    batch, source, new = task["batch"], task["source"], task["new"]
    tokens = torch.randint(words.nspecial, len(words), (batch, source))
    given = source if architecture.startswith("transformer_lm") else 0
    if not given:
        tokens[:, -1] = words.eos()
    inputs = {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((batch,), source)}}
    options = {"beam_size": task["beams"], "min_len": given + new - 1, "max_len_b": given + new - 1}
    return Job(model, words, options, [inputs], [tokens] if given else [])


def random_model(architecture: str, vocabulary: int, layers: int, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """A model of this architecture and its dictionary, of `vocabulary` words; 0 `layers`: the architecture's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

        import fastgen.models.prophetnet  # noqa: F401  # which registers its architectures
    words = Dictionary()
    for number in range(vocabulary - len(words)):
        words.add_symbol(str(number))
    counted = {"encoder_layers": layers, "decoder_layers": layers} if layers else {}
    args = Namespace(
        arch=architecture, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, **{**sizes, **counted}
    )
    ARCH_CONFIG_REGISTRY[architecture](args)
    task = Namespace(source_dictionary=words, target_dictionary=words, dictionary=words)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task), words


def _translation(task: dict[str, Any], folders: Folders) -> Job:
    """The same weights as transformers' form of this model, on the same sentences in the same batches."""
    import torch
    from fairseq import checkpoint_utils

    shared = folders["shared"]
    models, _, loaded = checkpoint_utils.load_model_ensemble_and_task(
        [f"{shared}/models/ddtp-en-de/checkpoint.pt"], arg_overrides={"data": f"{shared}/data/ddtp-en-de/data-bin"}
    )
    words = loaded.target_dictionary
    rows, batches = data.of(task, folders).ids, []
    for start in range(0, len(rows), task["batch"]):
        some = rows[start : start + task["batch"]]
        width = max(map(len, some))
        tokens = torch.tensor([[words.pad()] * (width - len(row)) + row for row in some])
        batches.append({"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(words.pad()).sum(1)}})
    return Job(models[0], words, {"beam_size": task["beams"], "max_len_b": task["new"]}, batches)
