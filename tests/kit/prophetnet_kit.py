"""Tiny ProphetNets with BERT's vocabulary, and their weights under the names of published checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq.data import indexed_dataset
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq_weights import as_loaded, weights_of
from torch import Tensor

import fastgen.models.prophetnet
from fastgen.models.prophetnet.dictionary import BertDictionary

USER_DIR = fastgen.models.prophetnet.__path__[0]
ARCHITECTURE = "ngram_transformer_prophet_large"
SEP = 24
SPECIAL = {"pad": 0, "unk": 22, "bos": 23, "eos": SEP}
WORDS = 47
ENDS = 1.8  # how much larger the end token's weights are: sentences end at different steps


def write_vocabulary(path: Path) -> Path:
    """As published: special tokens among the words, [PAD] first."""
    words = ["[PAD]", "[unused0]", "[X_SEP]", *(f"w{i}" for i in range(19)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"##v{i}" for i in range(WORDS - len(words))]
    path.write_text("".join(f"{word} {number}\n" for number, word in enumerate(words)), encoding="utf-8")
    return path


def arguments(**options: Any) -> Namespace:
    """What a checkpoint says of a tiny model: an architecture's defaults, and sizes."""
    args = Namespace(
        arch=ARCHITECTURE, task="translation_prophetnet", criterion="ngram_language_loss", label_smoothing=0.1,
        source_lang="src", target_lang="tgt", left_pad_source=True, left_pad_target=False,
        encoder_embed_dim=32, decoder_embed_dim=32, encoder_ffn_embed_dim=48, decoder_ffn_embed_dim=40,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
        max_source_positions=40, max_target_positions=50, ngram=3, num_buckets=8, relative_max_distance=20,
    )  # fmt: skip
    vars(args).update(options)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


def build(dictionary: Any, seed: int = 0, **options: Any) -> Any:
    """A model with random weights large enough that positions and streams matter, in evaluation mode."""
    args = arguments(**options)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
        for name, parameter in weights_of(model):
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2 if "embed" in name else 0.5)
            else:
                parameter.normal_(float(name.endswith("weight")), 0.1)  # a layer norm's about 1, biases about 0
        model.decoder.embed_tokens.weight[dictionary.eos()] *= ENDS
    return as_loaded(model).eval()


def vocabulary(folder: Path) -> BertDictionary:
    return BertDictionary.load(str(write_vocabulary(folder / "vocab.txt")))


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under the names of fairseq 0.9's: one projection for q, k and v, no output projection."""
    renamed = {
        name.replace("layernorm_embedding", "emb_layer_norm").replace("output_projection.weight", "embed_out"): tensor
        for name, tensor in state.items()
    }
    if torch.equal(state["decoder.embed_tokens.weight"], state["decoder.output_projection.weight"]):
        del renamed["decoder.embed_out"]
    for name in [name for name in renamed if name.startswith("decoder.layers.") and ".self_attn." in name]:
        renamed[name.replace(".self_attn.", ".ngram_self_attn.")] = renamed.pop(name)
    for name in [name for name in renamed if ".ngram_self_attn.q_proj." in name]:
        fused = [renamed.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        renamed[name.replace("q_proj.", "in_proj_")] = torch.cat(fused)
    return renamed


def sources(lengths: tuple[int, ...] = (7, 3, 9, 5), left: bool = True, seed: int = 0) -> dict[str, Any]:
    """A sample of sentences of these many words and an end."""
    random = torch.Generator().manual_seed(seed)
    width = max(lengths) + 1
    rows = torch.full((len(lengths), width), SPECIAL["pad"])
    for row, length in zip(rows, lengths, strict=True):
        words = torch.cat([torch.randint(26, WORDS, (length,), generator=random), torch.tensor([SEP])])
        row[slice(width - length - 1, width) if left else slice(0, length + 1)] = words
    inputs = {"src_tokens": rows, "src_lengths": rows.ne(SPECIAL["pad"]).sum(1), "prev_output_tokens": rows[:, :1]}
    return {"id": torch.arange(len(rows)), "nsentences": len(rows), "net_input": inputs, "target": None}


def targets(rows: int, length: int = 11, seed: int = 1) -> Tensor:
    """What a decoder has read: the end token and words, int64 `[rows, length]`."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(26, WORDS, (rows, length - 1), generator=random)
    return torch.cat([torch.full((rows, 1), SEP), words], dim=1)


def write_job(folder: Path) -> None:
    """What a command needs: data in the folder itself, and `checkpoint.pt` beside it in the published layout."""
    folder.mkdir(exist_ok=True)
    samples = [sources(seed=seed)["net_input"]["src_tokens"] for seed in range(4)]
    for side in ("src", "tgt"):
        write_vocabulary(folder / f"dict.{side}.txt")
        prefix = folder / f"test.src-tgt.{side}"
        builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=WORDS)
        for row in torch.cat(samples):
            builder.add_item(row[row.ne(SPECIAL["pad"])].int())
        builder.finalize(f"{prefix}.idx")
    weights = published(build(vocabulary(folder)).state_dict())
    history = {"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 0, "best_loss": 0}
    state = {"args": arguments(data=str(folder)), "model": weights, "optimizer_history": [history]}
    torch.save({**state, "extra_state": {}}, folder / "checkpoint.pt")
