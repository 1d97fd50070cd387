"""On a GPU: openai-whisper's results are those that stock finds there. Its steps are not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import report

whisper = pytest.importorskip("whisper")
from whisper.decoding import DecodingOptions  # noqa: E402
from whisper_kit import SOUND, tiny  # noqa: E402

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "five beams": dict(beam_size=5),
    "patience": dict(beam_size=3, patience=2.0),
    "samples": dict(temperature=0.7, best_of=4),
    "prompt": dict(beam_size=4, prompt=list(range(100, 120)), prefix=[300, 400]),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode(options: dict[str, Any]) -> None:
    model, sounds = tiny().cuda(), SOUND.cuda()
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
