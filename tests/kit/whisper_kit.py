"""Tiny random models of OpenAI's whisper, and sounds for them. Only for tests that have skipped without whisper."""

from __future__ import annotations

from typing import Any

import torch
import whisper
from whisper.decoding import DecodingOptions
from whisper.model import ModelDimensions, Whisper

END = 50257


def tiny(positions: int = 50, seed: int = 0, wide: int = 32, ending: float = 1.5) -> Any:
    """A model whose beams cross; the larger `ending`, the sooner they end."""
    torch.manual_seed(seed)
    sizes = dict(n_mels=80, n_audio_ctx=positions, n_vocab=51865, n_text_ctx=64)
    for part in ("audio", "text"):
        sizes |= {f"n_{part}_state": wide, f"n_{part}_head": 4, f"n_{part}_layer": 2}
    model = Whisper(ModelDimensions(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5) if parameter.ndim == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
        model.decoder.token_embedding.weight[END] *= ending
    return model


SOUND = torch.randn(3, 80, 100, generator=torch.Generator().manual_seed(1))


def decode(model: Any, sound: torch.Tensor, **options: Any) -> list[Any]:
    torch.manual_seed(3)
    options = {"language": "en", "sample_len": 24, "fp16": False, **options}
    results = whisper.decode(model, sound, DecodingOptions(**options))
    return results if isinstance(results, list) else [results]
