"""Languages and options of `fastgen-transcribe`: as whisper's own command has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transcribe_kit import LAYOUT, QUICK, assert_same, command, contents, expected

from fastgen.cli import transcribe

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.mark.parametrize("language", ["yue", "Cantonese"])
def test_a_language_that_the_model_has_not(
    language: str, checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [sound(), sound("b.wav")]
    assert command(checkpoint, files, tmp_path / "out", *QUICK, "--language", language) == 1
    said = capsys.readouterr().err
    assert f"--language {language} is none of the 99 languages of {checkpoint}: choose another one" in said
    assert said.count("\n") == 1 and not contents(tmp_path / "out")


@pytest.mark.parametrize("language", ["German", "de"])
def test_the_language_in_json_is_the_one_that_was_given(
    language: str, checkpoint: Path, sound: Any, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"language": language, "temperature": (0.0,)}
    file = sound()
    theirs = expected(checkpoint, [file], tmp_path / "theirs", LAYOUT, **given)["a.json"]
    assert command(checkpoint, [file], tmp_path / "ours", *QUICK, "--language", language, "-f", "json") == 0
    ours = contents(tmp_path / "ours")["a.json"]
    assert_same("a.json", theirs, ours)
    assert json.loads(ours)["language"] == language


@pytest.mark.parametrize(
    ("flags", "language", "said"),
    [
        ((), "en", ""),
        (("--language", "English"), "English", ""),
        (("--language", "en"), "en", ""),
        (("--language", "German"), "en", "tiny.en knows English alone: --language German is taken for --language en."),
    ],
)
def test_models_that_know_english_alone(
    flags: tuple[str, ...], language: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As whisper's own command has it, which goes by the model's name."""
    args = transcribe.parser().parse_args(["tiny.en", "a.wav", "-o", "out", "--device", "cpu", *flags])
    assert transcribe.settings_of(args).options["language"] == language
    assert capsys.readouterr().err.strip() == (f"{transcribe.NAME}: {said}" if said else "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max_line_count", "2"), "--max_line_count has no effect without --max_line_width."),
        (("--max_line_width", "9", "--max_words_per_line", "2"), "--max_words_per_line has no effect with --max_l"),
        (("--max_line_width", "9", "--max_line_count", "2"), ""),
    ],
)
def test_options_without_effect(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["tiny", "a.wav", "-o", "out", "--device", "cpu", "--word_timestamps", "True", *flags]
    transcribe.settings_of(transcribe.parser().parse_args(args))
    found = capsys.readouterr().err
    assert said in found and bool(said) == bool(found)


def test_whispers_defaults() -> None:
    """But for what has to be given, or is no option here: see docs/commands.md."""
    theirs = {
        "model_dir": None, "output_format": "all", "task": "transcribe", "language": None, "temperature": 0,
        "best_of": 5, "beam_size": 5, "patience": None, "length_penalty": None, "suppress_tokens": "-1",
        "initial_prompt": None, "carry_initial_prompt": False, "condition_on_previous_text": True, "fp16": True,
        "temperature_increment_on_fallback": 0.2, "compression_ratio_threshold": 2.4, "logprob_threshold": -1.0,
        "no_speech_threshold": 0.6, "word_timestamps": False, "highlight_words": False, "max_line_width": None,
        "max_line_count": None, "max_words_per_line": None, "threads": 0, "clip_timestamps": "0",
        "hallucination_silence_threshold": None,
    }  # fmt: skip
    ours = vars(transcribe.parser().parse_args(["tiny", "a.wav", "-o", "out"]))
    assert {name: ours[name] for name in theirs} == theirs
    assert transcribe.parser().parse_args(["tiny", "a.wav", "-o", "out", "--threads", "0"]).threads == 0
