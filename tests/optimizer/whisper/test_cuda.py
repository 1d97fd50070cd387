"""On a GPU: openai-whisper's results are those that stock finds there. Its steps are not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import report

whisper = pytest.importorskip("whisper")
from whisper.decoding import DecodingOptions  # noqa: E402
from whisper.model import ModelDimensions, Whisper  # noqa: E402

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "five beams": dict(beam_size=5),
    "patience": dict(beam_size=3, patience=2.0),
    "samples": dict(temperature=0.7, best_of=4),
    "prompt": dict(beam_size=4, prompt=list(range(100, 120)), prefix=[300, 400]),
}


def _tiny() -> Any:
    torch.manual_seed(0)
    sizes = dict(n_mels=80, n_audio_ctx=50, n_vocab=51865, n_text_ctx=64)
    for part in ("audio", "text"):
        sizes |= {f"n_{part}_state": 32, f"n_{part}_head": 4, f"n_{part}_layer": 2}
    model = Whisper(ModelDimensions(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5) if parameter.ndim == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.cuda()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode(options: dict[str, Any]) -> None:
    model = _tiny()
    sounds = torch.randn(3, 80, 100, generator=torch.Generator().manual_seed(1)).cuda()
    how = DecodingOptions(language="en", sample_len=24, fp16=False, **options)

    def decoded() -> list[Any]:
        torch.manual_seed(3)
        return [whisper.decode(model, sound, how) for sound in sounds]  # of several, stock decodes no beams

    with fastgen.disabled():
        expected = decoded()
    report.reset()
    with fastgen.configured(strict=True):
        found = decoded()
    assert [call.tier for call in report.calls()] == ["compat"] * 3
    for one, other in zip(expected, found, strict=True):
        assert one.tokens == other.tokens
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)
