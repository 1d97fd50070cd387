"""Loads a Whisper model of either kind of checkpoint, as the package `whisper` has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import InputError, needing, why_unloadable

# transformers' names of whisper's parameters, in the order in which they are replaced.
_NAMES = {
    "model.": "",
    ".layers.": ".blocks.",
    ".self_attn_layer_norm": ".attn_ln",
    ".encoder_attn_layer_norm": ".cross_attn_ln",
    ".final_layer_norm": ".mlp_ln",
    ".self_attn.": ".attn.",
    ".encoder_attn.": ".cross_attn.",
    ".q_proj": ".query",
    ".k_proj": ".key",
    ".v_proj": ".value",
    ".out_proj": ".out",
    ".fc1": ".mlp.0",
    ".fc2": ".mlp.2",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "embed_tokens": "token_embedding",
    "embed_positions.weight": "positional_embedding",
}
# What whisper's model computes; that of transformers can be told to compute something else.
_FIXED = {"activation_function": "gelu", "max_source_positions": 1500}
# What `from_pretrained` reads in a folder. Other files, such as outputs that are put there, are no part of the model.
_READ = "config.json", "generation_config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.index.json"


def files_of(name: str) -> list[Path]:
    """The model's files on this machine, by absolute paths; none if `name` is one of whisper's own, or the hub's."""
    with needing("openai-whisper", "transcribe"):
        import whisper
    place = Path(os.path.abspath(name))
    if name in whisper.available_models():
        return []
    if place.is_dir():
        return sorted({path for pattern in _READ for path in place.glob(pattern) if path.is_file()})
    return [place] if place.is_file() else []


def load(name: str, device: str, folder: str | None = None) -> Any:
    """A `whisper.Whisper` in float32, ready to transcribe.

    Args:
        name: of one of whisper's own models; or a file that whisper can load; or of a folder, or a model of the hub,
            with a `WhisperForConditionalGeneration` of transformers.
        folder: where whisper keeps the models that it downloads.

    Raises:
        InputError: there is no such model, or it can't be loaded.
    """
    with needing("openai-whisper", "transcribe"):
        import whisper
    if name.endswith(".pt") and not Path(name).is_file():  # no model of the hub is called so
        raise InputError(f"There is no model file {name}.")
    try:
        if name in whisper.available_models() or Path(name).is_file():
            return whisper.load_model(name, device=device, download_root=folder).float()
        return of_transformers(name).to(device)
    except InputError:
        raise
    except Exception as error:  # hosts raise what they like
        raise InputError(f"Cannot load the model {name}: {why_unloadable(error)}.") from error


def of_transformers(name: str) -> Any:
    """The same model, on the CPU, as the package `whisper` has it: parameters under its names, alignment heads set."""
    import torch
    import transformers
    from whisper.model import ModelDimensions, Whisper

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "whisper":
        raise InputError(f"{name} is a model of the type {config.model_type}, not whisper.")
    if config.vocab_size not in (51864, 51865, 51866):
        raise InputError(f"{name} has {config.vocab_size} tokens: whisper's tokenizers have 51864, 51865 or 51866.")
    for option, value in _FIXED.items():
        if (found := getattr(config, option)) != value:
            raise InputError(f"{name} has {option} {found!r}: whisper's own models have {value!r}.")
    host = transformers.WhisperForConditionalGeneration.from_pretrained(name, dtype=torch.float32)
    if not torch.equal(host.get_output_embeddings().weight, host.get_input_embeddings().weight):
        raise InputError(f"{name} has another matrix for its outputs than for its tokens: whisper's have one.")
    model = Whisper(
        ModelDimensions(
            n_mels=config.num_mel_bins,
            n_audio_ctx=config.max_source_positions,
            n_audio_state=config.d_model,
            n_audio_head=config.encoder_attention_heads,
            n_audio_layer=config.encoder_layers,
            n_vocab=config.vocab_size,
            n_text_ctx=config.max_target_positions,
            n_text_state=config.d_model,
            n_text_head=config.decoder_attention_heads,
            n_text_layer=config.decoder_layers,
        )
    )
    state = {_renamed(key): value for key, value in host.state_dict().items() if not key.startswith("proj_out")}
    model.load_state_dict(state)
    if heads := getattr(host.generation_config, "alignment_heads", None):
        mask = torch.zeros(config.decoder_layers, config.decoder_attention_heads, dtype=torch.bool, device="cpu")
        for layer, head in heads:
            mask[layer, head] = True
        model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    return model.eval()


def _renamed(name: str) -> str:
    """whisper's name of a parameter, from transformers'."""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
