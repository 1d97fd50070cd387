"""The models of the tasks, as transformers builds them: well-known shapes with random weights, and trained ones.

A shape's weights follow from the seed, so every process that builds it has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastgen.bench import allowed, data
from fastgen.bench.captioners import CAPTIONERS, job_parts
from fastgen.bench.data import Folders

_SEED = 0
_FREE_BELOW = 10  # ids below may mean something: random inputs have none of them


@dataclass(frozen=True)
class Shape:
    """A class of transformers, and its configuration; `layers` are the options that count layers.

    `published`: the dtype to which weights are rounded, as those of published models in float32 often were.
    """

    cls: str
    config: dict[str, Any]
    layers: tuple[str, ...]
    published: str = "float32"


_LAYERS = ("encoder_layers", "decoder_layers")


def _ends(width: int, encoder: int, decoder: int) -> dict[str, Any]:
    """Encoder and decoder as BART's relatives name them: heads of 64, and feed-forward layers four times as wide."""
    sizes = {"attention_heads": width // 64, "ffn_dim": 4 * width}
    each = {f"{end}_{name}": size for end in ("encoder", "decoder") for name, size in sizes.items()}
    return {"d_model": width, "encoder_layers": encoder, "decoder_layers": decoder, **each}


def _bart(width: int, encoder: int, decoder: int) -> Shape:
    config = dict(
        vocab_size=50265,
        **_ends(width, encoder, decoder),
        max_position_embeddings=1024,
        forced_eos_token_id=None,
    )
    return Shape("BartForConditionalGeneration", config, _LAYERS)


def _translation(width: int, layers: int) -> Shape:
    """The Transformer of Vaswani et al. (2017), with Marian's positions."""
    config = dict(
        vocab_size=32000,
        **_ends(width, layers, layers),
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return Shape("MarianMTModel", config, _LAYERS)


def _t5(width: int, layers: int, heads: int) -> Shape:
    config = dict(vocab_size=32128, d_model=width, d_kv=64, d_ff=4 * width, num_heads=heads, decoder_start_token_id=0)
    config |= dict(num_layers=layers, num_decoder_layers=layers)
    return Shape("T5ForConditionalGeneration", config, ("num_layers", "num_decoder_layers"))


def _prophetnet() -> Shape:
    config = dict(
        vocab_size=30522,
        hidden_size=1024,
        num_encoder_layers=12,
        num_decoder_layers=12,
        num_encoder_attention_heads=16,
        num_decoder_attention_heads=16,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        max_position_embeddings=512,
    )
    return Shape("ProphetNetForConditionalGeneration", config, ("num_encoder_layers", "num_decoder_layers"))


def _whisper(width: int, layers: int) -> Shape:
    config = dict(
        **_ends(width, layers, layers),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return Shape("WhisperForConditionalGeneration", config, _LAYERS)


def _llama_1b(published: str) -> Shape:
    """Llama 3.2 1B."""
    config = dict(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        pad_token_id=128004,
    )
    return Shape("LlamaForCausalLM", config, ("num_hidden_layers",), published)


def _qwen3() -> Shape:
    """Qwen3 0.6B."""
    config = dict(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=151643,
    )
    return Shape("Qwen3ForCausalLM", config, ("num_hidden_layers",))


SHAPES: dict[str, Shape] = {
    "bart-base": _bart(768, 6, 6),
    "bart-large": _bart(1024, 12, 12),
    "distilbart-12-6": _bart(1024, 12, 6),
    "transformer-base": _translation(512, 6),
    "transformer-big": _translation(1024, 6),
    "t5-small": _t5(512, 6, 8),
    "t5-base": _t5(768, 12, 12),
    "gpt2": Shape(
        "GPT2LMHeadModel",
        dict(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024, pad_token_id=50256),
        ("n_layer",),
    ),
    "llama-1b": _llama_1b("float32"),
    "llama-1b-bf16": _llama_1b("bfloat16"),
    "qwen3-0.6b": _qwen3(),
    "prophetnet-large": _prophetnet(),
    "unilm-base": Shape(
        "UnilmForSeq2Seq",
        dict(vocab_size=28996, max_position_embeddings=768, mask_token_id=103, num_hidden_layers=12),
        ("num_hidden_layers",),
    ),
    "whisper-tiny": _whisper(384, 4),
    "whisper-base": _whisper(512, 6),
    "whisper-small": _whisper(768, 12),
}


@dataclass(frozen=True)
class Job:
    """Calls of `model.generate`: the options, and the inputs of each batch."""

    model: Any
    options: dict[str, Any]
    batches: list[dict[str, Any]]

    @property
    def is_seq2seq(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def ends(self) -> list[int]:
        """The tokens that end an output."""
        found = self.model.generation_config.eos_token_id
        return [found] if isinstance(found, int) else list(found or [])

    def prompts(self) -> list[int]:
        """Of each input: how many tokens of its output were given."""
        found = []
        if "pixel_values" in self.batches[0]:  # what is returned begins with the prompt in some models alone
            return [0] * sum(len(batch["pixel_values"]) for batch in self.batches)
        if self.model.config.model_type == "whisper":  # whose own `generate` leaves them out
            return [0] * sum(len(batch["input_features"]) for batch in self.batches)
        for batch in self.batches:
            given = batch.get("decoder_input_ids") if self.is_seq2seq else batch["input_ids"]
            rows = len(next(iter(batch.values())))
            found += [1 if given is None else given.shape[1]] * rows
        return found


def build(task: dict[str, Any], folders: Folders, device: str = "cpu", dtype: str = "float32") -> Job:
    """The model and inputs of a task (as `Task.as_dict` gives it)."""
    import torch

    torch.manual_seed(_SEED)
    name = task["model"]
    if name in CAPTIONERS:
        job = Job(*job_parts(task))
    else:
        job = _random(task) if name in SHAPES else TRAINED[name].build(task, folders)
    model = job.model.eval().to(device=device, dtype=getattr(torch, dtype))
    batches = [{key: _moved(value, model) for key, value in batch.items()} for batch in job.batches]
    options = job.options | task["options"]
    if task.get("allowed_outputs"):
        options["prefix_allowed_tokens_fn"] = allowed.trie_for(task, model)
    return Job(model, options, batches)


def _moved(value: Any, model: Any) -> Any:
    return value.to(device=model.device, dtype=model.dtype if value.is_floating_point() else None)


def _random(task: dict[str, Any]) -> Job:
    """Fixed lengths: all sides do the same work, whatever the weights."""
    import torch

    shape = SHAPES[task["model"]]
    config = shape.config | (dict.fromkeys(shape.layers, task["layers"]) if task["layers"] else {})
    model = _made(shape.cls, config)
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, shape.published)).to(weight.dtype)
    batch, source, new = task["batch"], task["source"], task["new"]
    options = {"num_beams": task["beams"], "min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    if shape.cls.startswith("Whisper"):  # 30 s of speech are 3,000 frames, of which its encoder makes 1,500
        features = torch.randn(batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        start = torch.full((batch, 4), model.config.decoder_start_token_id)
        return Job(model, options, [{"input_features": features, "decoder_input_ids": start}])
    ids = torch.randint(_FREE_BELOW, model.config.vocab_size - _FREE_BELOW, (batch, source))
    return Job(model, options, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])


def _made(cls: str, config: dict[str, Any]) -> Any:
    import transformers

    if cls == "UnilmForSeq2Seq":
        from fastgen.models import unilm as source
    else:
        source = transformers
    made = getattr(source, cls)
    return made(made.config_class(**config))


# ---------------------------------------------------------------------------------------------- trained
@dataclass(frozen=True)
class Trained:
    what: str
    build: Callable[[dict[str, Any], Folders], Job]
    needs: tuple[str, ...] = ()  # folders


def padded(rows: list[list[int]], pad: int) -> dict[str, Any]:
    """A batch: ids and mask, int64 `[rows, longest]`."""
    import torch

    tensors = [torch.tensor(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def _seq2seq(model: Any, task: dict[str, Any], folders: Folders) -> Job:
    rows, size = data.of(task, folders).ids, task["batch"]
    pad = model.config.pad_token_id
    batches = [padded(rows[start : start + size], pad) for start in range(0, len(rows), size)]
    return Job(model, {"num_beams": task["beams"], "max_new_tokens": task["new"], "do_sample": False}, batches)


def _demo(task: dict[str, Any], folders: Folders) -> Job:
    import transformers

    from fastgen.demo.job import SHIPPED_MODEL

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(SHIPPED_MODEL)
    return _seq2seq(model, task, folders)


def _ddtp(task: dict[str, Any], folders: Folders) -> Job:
    import transformers

    folder = f"{folders['shared']}/models/ddtp-en-de"
    model = transformers.BartForConditionalGeneration.from_pretrained(f"{folder}/hf")
    return _seq2seq(model, task, folders)


def _g2p(task: dict[str, Any], folders: Folders) -> Job:
    import transformers

    model = transformers.BartForConditionalGeneration.from_pretrained(f"{folders['shared']}/models/g2p-bart-us")
    return _seq2seq(model, task, folders)


def _speech(task: dict[str, Any], folders: Folders) -> Job:
    """So many times the same 11 seconds of speech."""
    import numpy as np
    import torch
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(folders["whisper"])
    extract = transformers.WhisperFeatureExtractor.from_pretrained(folders["whisper"])
    speech = np.load(f"{folders['shared']}/data/audio/jfk.npy")
    features = extract([speech] * task["batch"], sampling_rate=16000, return_tensors="pt").input_features
    prompt = torch.tensor([[50258, 50259, 50359, 50363]] * task["batch"])  # English, transcribe, no timestamps
    options = {"num_beams": task["beams"], "max_new_tokens": task["new"]}
    return Job(model, options, [{"input_features": features, "decoder_input_ids": prompt}])


def _smollm(task: dict[str, Any], folders: Folders) -> Job:
    """Prompts of `source` tokens, the last one a shorter one padded on the left."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders["smollm"], trust_remote_code=False)
    tokenizer = data.tokenizer_of(folders, "smollm")
    batch, source = task["batch"], task["source"]
    texts = (tokenizer(text).input_ids[:source] for text in data.documents(folders))
    ids = torch.tensor(
        [ids for ids, _ in zip((ids for ids in texts if len(ids) == source), range(batch), strict=False)]
    )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    mask, short = torch.ones_like(ids), source * 3 // 5
    mask[-1, : source - short] = 0
    ids[-1] = ids[-1].roll(source - short).masked_fill(mask[-1] == 0, pad)
    options = {"num_beams": task["beams"], "max_new_tokens": task["new"], "do_sample": False, "pad_token_id": pad}
    return Job(model, options, [{"input_ids": ids, "attention_mask": mask}])


TRAINED = {
    "demo": Trained("the model that fastgen ships, figures written out in words", _demo),
    "ddtp": Trained("English to German, 4.0M parameters", _ddtp, ("shared",)),
    "g2p": Trained("words to phonemes, 0.75M parameters", _g2p, ("shared",)),
    "whisper": Trained("Whisper-base", _speech, ("shared", "whisper")),
    "smollm": Trained("SmolLM2-135M", _smollm, ("shared", "smollm")),
}
