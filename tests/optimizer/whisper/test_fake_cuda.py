"""The paths of CUDA without a GPU: no operator gets tensors of two devices, and tokens are stock's on the CPU.

Tensors say that they are on `cuda:0` and are on the CPU: see kit/fake_cuda.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen import report

whisper = pytest.importorskip("whisper")
import fake_cuda  # noqa: E402
from fake_cuda import to_cuda  # noqa: E402
from whisper_kit import SOUND, decode, tiny  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("own_threads"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
MODEL = tiny()
OPTIONS: dict[str, dict[str, Any]] = {
    "five beams": dict(beam_size=5),
    "patience": dict(beam_size=3, patience=2.0, length_penalty=0.6),
    "greedy": dict(),
    "samples": dict(temperature=0.7, best_of=4),
    "prompt": dict(beam_size=4, prompt=list(range(100, 120)), prefix=[300, 400]),
    "translation": dict(beam_size=3, task="translate", language="de"),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Nothing on the device is kept for later tests."""
    yield
    fastgen.release()


@pytest.mark.parametrize("options", OPTIONS)
def test_decode(options: str) -> None:
    sound = SOUND[0]
    with fastgen.disabled():
        expected = decode(MODEL, sound, **OPTIONS[options])
    model = fake_cuda.move(copy.deepcopy(MODEL).requires_grad_(False))
    with fake_cuda.device() as device:
        report.reset()
        found = decode(model, to_cuda(sound), **OPTIONS[options])
        assert not device.mixed, device.mixed
        assert {call.tier for call in report.calls()} == {"compat"}, report.calls()
    for one, other in zip(expected, found, strict=True):
        assert (one.tokens, one.text, one.language) == (other.tokens, other.text, other.language)
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-5)
