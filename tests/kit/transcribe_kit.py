"""`fastgen-transcribe`, and what whisper's own command writes. Only for tests that have skipped without whisper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration
from whisper.utils import get_writer

import fastgen
from fastgen.cli import transcribe
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.journal import NAME

LAYOUT = {"highlight_words": False, "max_line_width": None, "max_line_count": None, "max_words_per_line": None}
# A random model is never sure of itself: other temperatures would take minutes.
QUICK = (
    "--temperature_increment_on_fallback", "None", "--beam_size", "None", "-f", "txt", "--language", "en", "--quiet",
)  # fmt: skip


def hosts_whisper(encoder_layers: int = 1, decoder_layers: int = 1) -> Any:
    """A small random model of transformers, with whisper's own number of tokens."""
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=encoder_layers, decoder_layers=decoder_layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=51865,
        max_target_positions=64,
    )  # fmt: skip
    host = WhisperForConditionalGeneration(config).eval()
    host.generation_config._from_model_config = False  # as published models have it
    return host


def command(checkpoint: Path, files: list[Any], out: Path, *flags: Any) -> int:
    return transcribe.main([str(checkpoint), *map(str, files), "-o", str(out), *map(str, flags)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != NAME}


def expected(
    checkpoint: Path, files: list[Path], folder: Path, layout: dict[str, Any], **options: Any
) -> dict[str, bytes]:
    """What whisper writes, without fastgen."""
    folder.mkdir()
    with fastgen.disabled():
        model = whisper.load_model(str(checkpoint), device="cpu")
        for file in files:
            torch.manual_seed(0)
            result = whisper.transcribe(model, audio.read(file).samples, fp16=False, **options)
            get_writer("all", str(folder))(result, str(file), layout)
    return contents(folder)


def parts(value: Any, path: str = "") -> dict[str, Any]:
    """All that is in JSON, by path."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {where: part for key, each in items for where, part in parts(each, f"{path}/{key}").items()}
    return {path: pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value}


def assert_same(file: str, content: bytes, other: bytes) -> None:
    if file.endswith(".json"):  # with log-probabilities, whose last digits depend on what shares a step
        assert parts(json.loads(content)) == parts(json.loads(other))
    else:
        assert content == other
