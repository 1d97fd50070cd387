"""fastgen-demo --speech: whisper on the user's recordings, by both sides. Here the model is tiny and random."""

from __future__ import annotations

import os
import re
import shutil
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("whisper", reason="needs openai-whisper: pip install -c constraints.txt -e '.[transcribe]'")
pytest.importorskip("av", reason="needs PyAV: pip install -c constraints.txt -e '.[transcribe]'")

import numpy as np
import torch
from page_kit import parsed, row, tables
from whisper.model import ModelDimensions, Whisper

import fastgen
from fastgen.cli import demo
from fastgen.demo import comparison, speech

RATE = 16_000
TEXT = ("--limit", "1", "--beams", "2", "--quiet", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file as whisper's own models have it."""
    torch.manual_seed(0)
    sizes = dict(n_mels=80, n_audio_ctx=1500, n_vocab=51865, n_text_ctx=32)
    for part in ("audio", "text"):
        sizes |= {f"n_{part}_state": 32, f"n_{part}_head": 4, f"n_{part}_layer": 2}
    made = Whisper(ModelDimensions(**sizes))
    torch.nn.init.normal_(made.decoder.positional_embedding, std=0.02)  # whisper leaves whatever memory holds
    path = tmp_path_factory.mktemp("model") / "tiny.pt"
    torch.save({"dims": sizes, "model_state_dict": made.state_dict()}, path)
    return str(path)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Noise, 3 and 7 seconds of it."""
    folder, random = tmp_path_factory.mktemp("audio"), np.random.default_rng(0)
    found = []
    for seconds in (3, 7):
        path = folder / f"noise{seconds}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((random.normal(size=seconds * RATE) * 3000).astype("<i2").tobytes())
        found.append(str(path))
    return found


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = demo.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _of_speech(out: str) -> str:
    return out[out.index("Whisper,") :]


def test_speech_is_compared_beside_text(
    capsys: pytest.CaptureFixture[str], model: str, recordings: list[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    arguments = ["--speech", model, "--audio", *recordings, "--report", str(report)]
    status, out, _ = _run(capsys, *TEXT, *arguments)
    assert status == 0
    assert "BartForConditionalGeneration" in out and re.search(r"identical outputs +1 of 1", out)
    out = _of_speech(out)
    assert "2 recordings, 10 s, 2 beams" in out and "openai-whisper" not in out
    assert re.search(r"seconds of sound per second +[\d.]+ +[\d.]+", out)
    assert re.search(r"identical outputs +2 of 2", out)
    assert re.search(r"\d+ x compat: the loop of whisper over fastgen's cache", out)
    assert "noise3.wav" in out and "noise7.wav" in out
    assert "All 2 outputs are identical; fastgen was" in out
    assert speech.HOW_TO not in out
    page = parsed(report.read_text("utf-8"))
    assert [each.all("h2")[0].text for each in page.all("section")] == ["transformers", "whisper"]
    assert row(tables(page.all("section")[1])["Stock beside fastgen"], "identical outputs")["fastgen"] == "2 of 2"


@pytest.mark.parametrize("beams", [1, 3])
def test_each_side_runs_what_it_says(
    beams: int, model: str, recordings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock transcribes with fastgen off, and its tokens are whisper's own."""
    sides: list[str] = []
    generate = speech.SpeechJob.generate

    def watched(self: speech.SpeechJob, batch: Any) -> Any:
        sides.append("fastgen" if fastgen.status().enabled else "stock")
        return generate(self, batch)

    monkeypatch.setattr(speech.SpeechJob, "generate", watched)
    job = speech.build_job(model, [Path(each) for each in recordings], beams=beams, device="cpu")
    result = comparison.compare(job, progress=False)
    assert sides == ["stock", "fastgen", "stock", "fastgen", "fastgen", "stock", "stock", "fastgen"]
    assert result.identical == 2 and {tier for tier, _ in result.tiers} == {"compat"}
    with fastgen.disabled():
        alone = job.model.transcribe(
            job.recordings[1], beam_size=None if beams == 1 else beams, temperature=0.0, fp16=False
        )
    tokens = [token for segment in alone["segments"] for token in segment["tokens"]]
    assert tokens and result.sides["fastgen"].tokens[1] == tokens
    assert result.sides["fastgen"].texts[1] == alone["text"].strip()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_name_that_is_no_utf8(
    capsys: pytest.CaptureFixture[str], model: str, recordings: list[str], tmp_path: Path
) -> None:
    named = Path(os.fsdecode(os.fsencode(tmp_path / "noise") + b"\xe9.wav"))
    shutil.copy(recordings[0], named)
    report = tmp_path / "report.html"
    status, out, err = _run(capsys, *TEXT, "--speech", model, "--audio", str(named), "--report", str(report))
    assert (status, err) == (0, "")
    assert "noise\\udce9.wav" in out and "noise\\udce9.wav" in report.read_text("utf-8")


def test_a_difference_fails(
    capsys: pytest.CaptureFixture[str], model: str, recordings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    new_tokens = speech.SpeechJob.new_tokens
    calls: list[int] = []

    def spoiled(self: speech.SpeechJob, *args: Any) -> list[list[int]]:
        calls.append(1)
        (found,) = new_tokens(self, *args)
        return [found[:-1] if len(calls) == 2 else found]

    monkeypatch.setattr(speech.SpeechJob, "new_tokens", spoiled)
    status, out, _ = _run(capsys, *TEXT, "--speech", model, "--audio", recordings[0])
    assert status == 1
    assert "1 of 1 outputs differ. The first, input 1:" in _of_speech(out)


def test_how_speech_is_shown_is_said_where_whisper_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys, *TEXT)
    assert status == 0 and out.endswith(f"\n{speech.HOW_TO}\n")


def test_nothing_is_said_of_speech_without_whisper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "is_installed", lambda: False)
    assert "--speech" not in _run(capsys, *TEXT)[1]


# ---------------------------------------------------------------------------------------------- bad input
def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    status, out, err = _run(capsys, *argv)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("fastgen-demo: ") and err.endswith(".\n")
    return err


@pytest.mark.parametrize("alone", [("--speech", "base"), ("--audio", "talk.wav")])
def test_a_model_and_a_recording_belong_together(capsys: pytest.CaptureFixture[str], alone: tuple[str, str]) -> None:
    assert "--speech MODEL and --audio FILE" in _refusal(capsys, *alone)


def test_a_recording_that_is_none(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    assert "none.wav" in _refusal(capsys, "--speech", model, "--audio", str(tmp_path / "none.wav"))
    (tmp_path / "text.wav").write_text("no sound")
    assert "no audio" in _refusal(capsys, "--speech", model, "--audio", str(tmp_path / "text.wav"))


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str], recordings: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"no weights")
    message = _refusal(capsys, "--speech", str(tmp_path / "model.pt"), "--audio", recordings[0])
    assert "Cannot load the model" in message and "model.pt" in message
