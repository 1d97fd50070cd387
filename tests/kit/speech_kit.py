"""A tiny random Whisper of transformers with tokenizer and feature extractor, as a pipeline, and sounds for it.

It reads two seconds at a time where the real one reads thirty, and every timestamp is one second or later: so each
window of a long recording gets on, whatever the model says.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import torch
import transformers

SECONDS, RATE = 2, 16_000
_FRAME = 0.02
_NAMES = "startoftranscript en de translate transcribe startoflm startofprev nospeech notimestamps".split()


def _tokens() -> tuple[dict[str, int], list[str]]:
    """The vocabulary, one token for each byte, and the special tokens behind it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    times = [f"<|{number * _FRAME:.2f}|>" for number in range(int(SECONDS / _FRAME) + 1)]
    return {letter: number for number, letter in enumerate(letters)}, [f"<|{name}|>" for name in _NAMES] + times


def _tokenizer() -> Any:
    vocabulary, special = _tokens()
    vocabulary["<|endoftext|>"] = len(vocabulary)
    found = transformers.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    times = [name for name in special if name[2].isdigit()]
    found.add_special_tokens({"additional_special_tokens": [name for name in special if name not in times]})
    found.add_tokens([transformers.AddedToken(name, special=False, normalized=False) for name in times])
    return found


def tiny(seed: int = 0) -> Any:
    """A pipeline whose texts end soon."""
    tokenizer = _tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in (*_NAMES, "endoftext")}
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=16,
        max_source_positions=round(SECONDS / _FRAME),
        max_target_positions=64,
        init_std=0.4,
        median_filter_width=3,
        pad_token_id=ids["endoftext"],
        bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"],
        decoder_start_token_id=ids["startoftranscript"],
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[ids["endoftext"]] *= 1.5
    first_time = ids["notimestamps"] + 1
    settings = dict(
        is_multilingual=True,
        lang_to_id={"<|en|>": ids["en"], "<|de|>": ids["de"]},
        task_to_id={"translate": ids["translate"], "transcribe": ids["transcribe"]},
        no_timestamps_token_id=ids["notimestamps"],
        prev_sot_token_id=ids["startofprev"],
        alignment_heads=[[0, 1], [1, 0], [1, 2]],
        begin_suppress_tokens=[ids["endoftext"]],
        suppress_tokens=[*range(first_time, first_time + round(SECONDS / _FRAME / 2))],
        return_timestamps=False,
        max_length=48,
    )
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    return transformers.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=extractor, device="cpu"
    )


def sound(seconds: float, seed: int) -> np.ndarray[Any, Any]:
    """Tones that change, with some noise, float32 `[samples]`."""
    chance = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (200 + 300 * chance.random() + 50 * np.floor(time * 4) % 400) * time)
    return (0.25 * tone + 0.02 * chance.standard_normal(len(time))).astype(np.float32)


def wav(samples: Any) -> bytes:
    """The bytes of a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
