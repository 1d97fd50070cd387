"""The names that a page's blocks take for granted: small models, and what they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

LINES = ["order 4213, due 3 May 2021", "costs $17.20", "bus 7 at 14:05", "room 12", "page 3 at 09:30, owes $5.00"]
Names = dict[str, Any]


@functools.cache
def shipped() -> tuple[Any, Any]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from fastgen.demo.job import SHIPPED_MODEL

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    return AutoModelForSeq2SeqLM.from_pretrained(SHIPPED_MODEL).eval(), tokenizer


def model_and_lines() -> Names:
    model, tokenizer = shipped()
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return dict(model=model, tokenizer=tokenizer, lines=list(LINES), inputs=inputs)


def name_and_lines() -> Names:
    from fastgen.demo.job import SHIPPED_MODEL

    return dict(name=str(SHIPPED_MODEL), lines=list(LINES))


def on_a_cluster_of_its_own(monkeypatch: Any) -> Names:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # else Ray finds one that another test's nodes make up
    return name_and_lines()


def with_encoder() -> Names:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    encoder = BertModel(BertConfig(vocab_size=61, **sizes)).eval()
    ids = torch.randint(5, 60, (4, 40))
    mask = (torch.arange(40) < torch.tensor([40, 7, 9, 6])[:, None]).long()
    return dict(model_and_lines(), encoder=encoder, texts=dict(input_ids=ids * mask, attention_mask=mask))


def tensors() -> Names:
    """What the operators take: 2 sentences of 4 beams."""
    torch.manual_seed(0)
    weight = torch.randn(61, 32)
    return dict(
        tokens=torch.randint(5, 9, (8, 12)),
        scores=torch.randn(8, 61),
        source=torch.randint(5, 9, (2, 10)),
        logits=torch.randn(8, 61),
        sums=torch.randn(2, 4),
        probabilities=torch.rand(8, 61),
        query=torch.randn(8, 4, 1, 8),
        key=torch.randn(2, 2, 20, 8),
        value=torch.randn(2, 2, 20, 8),
        mask=torch.zeros(2, 1, 4, 20),
        scale=8**-0.5,
        shared=15,
        paths=torch.randint(15, 20, (8, 5), dtype=torch.int32),
        rows=torch.randn(8, 32),
        weight=weight,
        q_weight=weight[:32],
        k_weight=weight[:16],
        v_weight=weight[16:32],
        bias=torch.randn(61),
    )


@functools.cache
def _generator() -> tuple[Any, Any]:
    """A tiny random translation model of fairseq, and its dictionary."""
    import argparse

    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture
    from fairseq.sequence_generator import SequenceGenerator

    class Task:
        def __init__(self) -> None:
            self.source_dictionary = self.target_dictionary = Dictionary()
            for number in range(40):
                self.source_dictionary.add_symbol(f"word{number}")

    torch.manual_seed(0)
    task = Task()
    args = argparse.Namespace(max_source_positions=64, max_target_positions=64)
    for side in ("encoder", "decoder"):
        for name, size in dict(embed_dim=32, ffn_embed_dim=48, layers=2, attention_heads=4).items():
            setattr(args, f"{side}_{name}", size)
    base_architecture(args)
    model = TransformerModel.build_model(args, task).eval().requires_grad_(False)
    return SequenceGenerator([model], task.target_dictionary, beam_size=4, max_len_b=12), task.source_dictionary


def fairseq_generator() -> Names:
    generator, words = _generator()

    def sample(seed: int) -> Names:
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(words.nspecial, len(words), (3, 7), generator=made)
        tokens[:, -1] = words.eos()
        inputs = dict(src_tokens=tokens, src_lengths=torch.full((3,), 7), prev_output_tokens=tokens[:, -1:])
        return dict(id=torch.arange(3), nsentences=3, ntokens=21, net_input=inputs)

    models = list(generator.model.models)
    return dict(generator=generator, models=models, sample=sample(0), samples=[sample(seed) for seed in range(4)])


def fairseq_sentence() -> Names:
    names = fairseq_generator()
    inputs = {name: value[:1] for name, value in names["sample"]["net_input"].items()}
    return names | dict(sample=dict(id=torch.arange(1), nsentences=1, ntokens=7, net_input=inputs))


def whisper_model(monkeypatch: Any) -> Names:
    """`load_model` and what reads files as they are, but for a tiny random model and noise."""
    import numpy
    import whisper
    from whisper.model import ModelDimensions, Whisper

    from fastgen.pipeline.transcription import recordings

    def load_model(name: str) -> Any:
        torch.manual_seed(0)
        sizes = dict(n_mels=80, n_audio_ctx=1500, n_vocab=51865, n_text_ctx=32)
        for part in ("audio", "text"):
            sizes |= {f"n_{part}_state": 32, f"n_{part}_head": 4, f"n_{part}_layer": 2}
        model = Whisper(ModelDimensions(**sizes)).eval()
        torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # whisper leaves whatever memory holds
        return model

    def load_audio(path: str) -> Any:
        return numpy.random.default_rng(0).normal(size=16000).astype("float32") * 0.1

    monkeypatch.setattr(whisper, "load_model", load_model)
    monkeypatch.setattr(whisper.audio, "load_audio", load_audio)
    monkeypatch.setattr(recordings, "_checked", lambda source, number: load_audio(source))
    return {}


def own_models() -> Names:
    """Files under the names of published ones, with tiny random models."""
    from pathlib import Path

    from fastgen.models.unilm import UnilmConfig, UnilmForSeq2Seq
    from fastgen.models.vae import Gpt2VaeConfig, Gpt2VaeLMHeadModel

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "$", ":", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    words += [f"##{word}" for word in words[9:]]
    Path("bert-base-cased").mkdir()
    Path("bert-base-cased/vocab.txt").write_text("\n".join(words), "utf-8")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    unilm = UnilmForSeq2Seq(UnilmConfig(vocab_size=len(words), max_position_embeddings=768, mask_token_id=4, **sizes))
    unilm.config.save_pretrained(".")
    torch.save(unilm.state_dict(), "cnndm.unilm1-base-cased.bin")
    config = Gpt2VaeConfig(latent_size=6, vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=3)
    Gpt2VaeLMHeadModel(config).save_pretrained("optimus-decoder")
    return dict(articles=list(LINES))


# By page and by what its blocks need; a page that is not here needs no names.
NAMES: dict[tuple[str, str | None], Callable[..., Names]] = {
    ("README.md", None): model_and_lines,
    ("docs/cluster.md", "ray"): on_a_cluster_of_its_own,
    ("docs/coming-from.md", None): model_and_lines,
    ("docs/coming-from.md", "fairseq"): fairseq_generator,
    ("docs/coming-from.md", "whisper"): whisper_model,
    ("docs/exact.md", None): model_and_lines,
    ("docs/fairseq.md", "fairseq"): fairseq_generator,
    ("docs/lists.md", None): model_and_lines,
    ("docs/lists.md", "fairseq"): fairseq_generator,
    ("docs/models-of-our-own.md", None): own_models,
    ("docs/operators.md", None): tensors,
    ("docs/prefixes.md", None): model_and_lines,
    ("docs/recipes.md", None): model_and_lines,
    ("docs/recipes.md", "whisper"): whisper_model,
    ("docs/searches.md", None): model_and_lines,
    ("docs/searches.md", "fairseq"): fairseq_sentence,
    ("docs/slim-caches.md", None): model_and_lines,
    ("docs/slim-caches.md", "fairseq"): fairseq_generator,
    ("docs/transformers.md", None): with_encoder,
    ("docs/tries.md", None): model_and_lines,
    ("docs/troubleshooting.md", None): model_and_lines,
    ("docs/whisper.md", "whisper"): whisper_model,
}
