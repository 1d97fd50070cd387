"""`fastgen-transcribe`: the files that whisper writes, of both kinds of checkpoint; bad files, kills, bad flags."""

from __future__ import annotations

import io
import json
import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kill_kit
import numpy as np
import pytest
import torch
import whisper
from transcribe_kit import LAYOUT, assert_same, command, contents, expected, hosts_whisper

import fastgen
from fastgen.cli import transcribe
from fastgen.pipeline.transcription import audio, load, together
from fastgen.pipeline.transcription.journal import NAME
from fastgen.pipeline.transcription.progress import AudioProgress

pytestmark = pytest.mark.usefixtures("own_threads")

TEMPERATURES = tuple(np.arange(0, 1.0 + 1e-6, 0.2))
CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "as it is": ([], {}, {}),
    "greedy": (["--beam_size", "None", "--task", "translate"], {"beam_size": None, "task": "translate"}, {}),
    "patience": (["--patience", "2", "--beam-size", "3"], {"patience": 2.0, "beam_size": 3}, {}),
    "words": (
        ["--word_timestamps", "True", "--max_words_per_line", "2", "--highlight_words", "True"],
        {"word_timestamps": True},
        {"max_words_per_line": 2, "highlight_words": True},
    ),
    "prompt": (
        ["--initial_prompt", "Names: Ada.", "--condition_on_previous_text", "False", "--clip_timestamps", "1,3"],
        {"initial_prompt": "Names: Ada.", "condition_on_previous_text": False, "clip_timestamps": "1,3"},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_files_that_whisper_writes(name: str, checkpoint: Path, sound: Any, tmp_path: Path) -> None:
    flags, options, layout = CASES[name]
    files = [sound("one.wav", 5.0), sound("two.wav", 41.0, seed=2)]
    # A random model is never sure of itself: no other temperatures, or the test would take minutes.
    flags = [*flags, "--language", "en", "--temperature_increment_on_fallback", "None"]
    given: dict[str, Any] = {"language": "en", "beam_size": 5, "temperature": (0.0,), **options}
    theirs = expected(checkpoint, files, tmp_path / "theirs", LAYOUT | layout, **given)
    assert len(theirs) == 10 and any(map(len, theirs.values()))
    before = fastgen.status().counters.get("compat", 0)
    assert command(checkpoint, files, tmp_path / "ours", *flags) == 0
    ours = contents(tmp_path / "ours")
    assert [*ours] == [*theirs]
    for file, content in theirs.items():
        assert_same(file, content, ours[file])
    assert fastgen.status().counters["compat"] > before, "nothing was accelerated"


def test_temperatures() -> None:
    """As whisper's command computes them; only what is drawn depends on the random stream."""
    assert transcribe.temperatures(0.0, 0.2) == list(TEMPERATURES)
    assert transcribe.temperatures(0.5, None) == [0.5]


def test_one_format_and_standard_input(
    checkpoint: Path, sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--temperature_increment_on_fallback", "None", "-f", "srt", "--language", "german")
    file = sound()
    assert command(checkpoint, [file], tmp_path / "a", *flags) == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(file.read_bytes())))
    assert command(checkpoint, ["-"], tmp_path / "b", *flags) == 0
    assert [*contents(tmp_path / "b")] == ["stdin.srt"] and [*contents(tmp_path / "a")] == ["a.srt"]
    assert contents(tmp_path / "a")["a.srt"] == contents(tmp_path / "b")["stdin.srt"]


def test_bad_files_are_named_and_the_others_done(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "text.mp3"
    bad.write_text("no sound")
    files = [bad, sound(), tmp_path / "missing.wav", sound("b.wav", 0.01)]
    flags = ("--temperature_increment_on_fallback", "None", "-f", "txt", "--language", "en", "--quiet")
    assert command(checkpoint, files, tmp_path / "out", *flags) == 1
    said = capsys.readouterr().err
    assert f"{bad} is no audio that FFmpeg knows" in said and f"Cannot read {files[2]}: No such file" in said
    assert "2 files of 4 could not be transcribed." in said
    assert [*contents(tmp_path / "out")] == ["a.txt", "b.txt"]
    bad.unlink()
    bad.write_bytes(files[1].read_bytes())
    assert command(checkpoint, files, tmp_path / "out", *flags, "--resume") == 1
    assert "1 file of 4" in capsys.readouterr().err
    assert [*contents(tmp_path / "out")] == ["a.txt", "b.txt", "text.txt"]


def test_silence_noise_and_clipping(checkpoint: Path, tmp_path: Path) -> None:
    """Each ends in what whisper writes."""
    chance, time = np.random.default_rng(0), np.arange(2 * audio.RATE)
    kinds = {
        "silence": np.zeros(len(time)),
        "noise": 6000 * chance.standard_normal(len(time)),
        "clipped": np.clip(200_000 * np.sin(time / 30), -32768, 32767),
    }
    for name, samples in kinds.items():
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, audio.RATE, 0, "NONE", ""))
            file.writeframes(samples.astype("<i2").tobytes())
    files = [tmp_path / f"{name}.wav" for name in kinds]
    theirs = expected(checkpoint, files, tmp_path / "theirs", LAYOUT, language="en", beam_size=5, temperature=(0.0,))
    flags = ("--language", "en", "--temperature_increment_on_fallback", "None", "--quiet")
    assert command(checkpoint, files, tmp_path / "ours", *flags) == 0
    ours = contents(tmp_path / "ours")
    assert [*ours] == [*theirs] and len(ours) == 15
    for file, content in theirs.items():
        assert_same(file, content, ours[file])


def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    checkpoint: Path, sound: Any, tmp_path: Path
) -> None:
    files = [sound(f"{number}.wav", 1.0, seed=number) for number in range(24)]
    flags = ("--temperature_increment_on_fallback", "None", "--language", "en", "--beam_size", "2", "--quiet")
    flags = (*flags, "--batch_size", "2")  # more would be finished together
    assert command(checkpoint, files, tmp_path / "whole", *flags) == 0
    out = tmp_path / "out"
    kills = kill_kit.kill_at_random(
        lambda: command(checkpoint, files, out, *flags, "--resume"), out / NAME, kills=10, seed=3
    )
    assert kills == 10
    (out / ".fastgen-unfinished-1").mkdir()
    assert command(checkpoint, files, out, *flags, "--resume") == 0
    resumed, whole = contents(out), contents(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    for file, content in whole.items():
        assert_same(file, content, resumed[file])
    assert not [path for path in out.iterdir() if path.is_dir()], "what a killed run leaves behind is removed"


def test_what_is_finished_is_not_done_again(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, out = [sound("a.wav"), sound("b.wav")], tmp_path / "out"
    flags = ("--temperature_increment_on_fallback", "None", "-f", "txt", "--language", "en", "--quiet")
    assert command(checkpoint, files, out, *flags) == 0
    done: list[Any] = []
    real = whisper.transcribe
    monkeypatch.setattr(whisper, "transcribe", lambda *args, **options: (done.append(1), real(*args, **options))[1])
    assert command(checkpoint, files, out, *flags, "--resume") == 0 and not done
    assert f"{out} is complete: nothing to resume." in capsys.readouterr().err
    assert command(checkpoint, files, out, *flags) == 1
    assert f"{out}/a.txt exists; --resume goes on with the run that wrote it" in capsys.readouterr().err
    assert command(checkpoint, files, out, *flags, "--resume") == 0 and not done, "a refused run changes nothing"
    assert command(checkpoint, files, out, *flags, "--resume", "--beam_size", "2") == 1
    assert "the run was begun with another beam_size (5, not 2)" in capsys.readouterr().err
    (out / "a.txt").write_text("other")
    sound("b.wav", 1.0)
    assert command(checkpoint, files, out, *flags, "--resume") == 0 and len(done) == 2
    assert command(checkpoint, files, out, *flags, "--resume") == 0 and len(done) == 2
    assert command(checkpoint, files, out, *flags, "--overwrite") == 0 and len(done) == 4
    more = [sound("c.wav"), files[0]]
    assert command(checkpoint, more, out, *flags, "--resume") == 0 and len(done) == 5
    assert command(checkpoint, [*files, more[0]], out, *flags, "--resume") == 0 and len(done) == 5
    (out / NAME).write_text("no journal\n")
    assert command(checkpoint, files, out, *flags, "--resume") == 1
    assert "is not a journal of this command" in capsys.readouterr().err
    (out / NAME).unlink()
    for _ in range(2):  # nobody's run has written these
        assert command(checkpoint, files, out, *flags, "--resume") == 1 and len(done) == 5
        assert f"{out}/a.txt exists; --overwrite replaces it." in capsys.readouterr().err
    assert command(checkpoint, files, out, *flags, "--resume", "--overwrite") == 1
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_first_segment_without_text(
    checkpoint: Path, sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """whisper gives it words, none, whether somebody wants words or not, and its writers of subtitles then want all."""
    empty = {"id": 0, "seek": 0, "start": 0.0, "end": 2.0, "text": "", "tokens": [], "words": []}
    spoken = {"id": 1, "seek": 200, "start": 2.0, "end": 3.5, "text": " Yes --> no.", "tokens": [1]}
    result = {"text": " Yes --> no.", "segments": [empty, spoken], "language": "en"}
    monkeypatch.setattr(whisper, "transcribe", lambda *_, **__: result)
    files, out = [sound("a.wav"), sound("b.wav")], tmp_path / "out"
    assert command(checkpoint, files, out, "--quiet") == 0
    found = contents(out)
    assert len(found) == 10 and json.loads(found["a.json"]) == result
    assert (
        found["a.srt"].decode()
        == "1\n00:00:00,000 --> 00:00:02,000\n\n\n2\n00:00:02,000 --> 00:00:03,500\nYes -> no.\n\n"
    )
    assert found["b.vtt"].decode() == "WEBVTT\n\n00:00.000 --> 00:02.000\n\n\n00:02.000 --> 00:03.500\nYes -> no.\n\n"


@pytest.mark.parametrize("flags", [("--quiet",), ()])
def test_files_are_looked_into_for_the_progress_line_alone(
    flags: tuple[str, ...], checkpoint: Path, sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes minutes where there are thousands."""
    seen: list[Path] = []
    monkeypatch.setattr(audio, "seconds_of", lambda path: seen.append(path))
    monkeypatch.setattr(whisper, "transcribe", lambda *_, **__: {"text": "", "segments": [], "language": "en"})
    files = [sound(f"{number}.wav") for number in range(3)]
    assert command(checkpoint, files, tmp_path / "out", "-f", "txt", *flags) == 0
    assert seen == ([] if flags else files[:1])  # one that does not say it is enough


def test_standard_input_is_never_done(
    checkpoint: Path, sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--temperature_increment_on_fallback", "None", "-f", "json", "--language", "en", "--quiet")
    found = []
    for seconds in (1.0, 33.0):
        data = io.BytesIO(sound(seconds=seconds, seed=int(seconds)).read_bytes())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
        assert command(checkpoint, ["-"], tmp_path / "out", *flags, "--resume") == 0
        found.append(contents(tmp_path / "out"))
    assert found[0] != found[1]


@pytest.mark.parametrize("error", [RuntimeError("no reason"), AssertionError(), MemoryError("full")])
def test_an_error_in_one_file(
    error: Exception,
    checkpoint: Path,
    sound: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 2 if isinstance(error, MemoryError) else 1  # beside another file, and then alone
    real, errors = whisper.transcribe, [error] * tries

    def failing(model: Any, samples: Any, **options: Any) -> Any:
        if errors and len(samples) == 2 * audio.RATE:  # the first file
            raise errors.pop()
        return real(model, samples, **options)

    monkeypatch.setattr(whisper, "transcribe", failing)
    files = [sound("a.wav"), sound("talk:1.wav", 2.5)]
    flags = ("--temperature_increment_on_fallback", "None", "-f", "txt", "--language", "en", "--quiet")
    assert command(checkpoint, files, tmp_path / "out", *flags) == 1
    assert f"{files[0]} could not be transcribed: {type(error).__name__}" in capsys.readouterr().err
    assert [*contents(tmp_path / "out")] == ["talk:1.txt"]


def test_a_file_that_nobody_has_foreseen(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a library raises as it reads one file costs that file alone."""
    files = [sound("a.wav"), sound("b.wav", 1.0)]
    real = audio._decoded

    def failing(av: Any, file: Any, *others: Any) -> Any:
        if file.duration > 1.5e6:  # microseconds: the first file
            raise KeyError("a format of tomorrow")
        return real(av, file, *others)

    monkeypatch.setattr(audio, "_decoded", failing)
    flags = ("--temperature_increment_on_fallback", "None", "-f", "txt", "--language", "en", "--quiet")
    assert command(checkpoint, files, tmp_path / "out", *flags) == 1
    said = capsys.readouterr().err
    assert f"{files[0]} could not be read: KeyError: " in said and "1 file of 2" in said
    assert [*contents(tmp_path / "out")] == ["b.txt"]


def test_strict_ends_the_run(
    checkpoint: Path,
    sound: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise fastgen.FallbackError("the model has hooks")

    monkeypatch.setattr(whisper, "transcribe", refuse)
    assert command(checkpoint, [sound(), sound("b.wav")], tmp_path / "out", "--language", "en") == 1
    said = capsys.readouterr().err
    assert "FASTGEN_STRICT is set, and fastgen cannot accelerate this: the model has hooks." in said
    assert "b.wav" not in said


def test_clips_beyond_the_end(checkpoint: Path, sound: Any, tmp_path: Path) -> None:
    """whisper itself would never end."""
    flags = ("--temperature_increment_on_fallback", "None", "-f", "json", "--language", "en", "--quiet")
    assert command(checkpoint, [sound(seconds=2.0)], tmp_path / "a", *flags, "--clip_timestamps", "1,9,20,30") == 0
    assert command(checkpoint, [sound(seconds=2.0)], tmp_path / "b", *flags, "--clip_timestamps", "1,2") == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--batched", "True", "--clip_timestamps", "1,2"), "--clip_timestamps can't be given with --batched"),
        (("--temperature", 1.5), "--temperature 1.5 is not between 0 and 1."),
        (("--patience", 2, "--beam_size", "None"), "--patience needs --beam_size."),
        (("--clip_timestamps", "soon"), "--clip_timestamps soon is no list of seconds such as 0,30,60,90."),
        (("--language", "klingon"), "--language klingon is no language of whisper's"),
        (("--max_line_width", 20), "--max_line_width needs --word_timestamps True."),
        (("--beam_size", "many"), "Argument --beam_size/--beam-size: invalid int value: 'many'"),
        (("--beam_size", 0), "--beam_size 0 is not 1 or more: give None for greedy search."),
        (("--suppress_tokens", "1,x"), "--suppress_tokens 1,x is no list of token ids such as 5,6,7."),
        (("--temperature_increment_on_fallback", 0), "'0' is not a number above 0"),
        (("--word_timestamps", "perhaps"), "'perhaps' is neither True nor False"),
        (("-f", "doc"), "invalid choice: 'doc'"),
    ],
)
def test_bad_flags(flags: Any, said: str, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "no model", [sound()], tmp_path / "out", *flags) == 1
    assert said in capsys.readouterr().err


def test_bad_models_and_names(checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.pt"
    torch.save({"weights": 1}, other)
    for model in (tmp_path / "nothing", other):
        assert command(model, [sound()], tmp_path / "out") == 1
        assert f"Cannot load the model {model}" in capsys.readouterr().err
    assert command(tmp_path / "nothing.pt", [sound()], tmp_path / "out") == 1
    assert f"There is no model file {tmp_path}/nothing.pt." in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    assert command(checkpoint, [sound(), sound("x/a.flac")], tmp_path / "out") == 1
    assert "would both be written to" in capsys.readouterr().err


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """The same model: its encoder and decoder compute the same, and the same heads align."""
    host = hosts_whisper(encoder_layers=2, decoder_layers=3)
    host.generation_config.alignment_heads = [[1, 2], [2, 0]]
    host.save_pretrained(tmp_path)
    model = load.load(str(tmp_path), "cpu")
    mel, tokens = torch.randn(2, 80, 3000), torch.tensor([[50258, 50259, 7], [50258, 50260, 9]])
    with torch.no_grad():
        theirs = host(input_features=mel, decoder_input_ids=tokens).logits
        torch.testing.assert_close(model(mel, tokens), theirs, rtol=1e-4, atol=1e-4)
    assert model.alignment_heads.to_dense().nonzero().tolist() == [[1, 2], [2, 0]]


def test_other_models_of_transformers_are_refused(
    sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for config, said in (
        ({"model_type": "bart"}, "is a model of the type bart, not whisper"),
        ({"model_type": "whisper", "vocab_size": 99}, "has 99 tokens"),
        ({"model_type": "whisper", "activation_function": "relu"}, "has activation_function 'relu': whisper's own"),
        ({"model_type": "whisper", "max_source_positions": 750}, "has max_source_positions 750: whisper's own"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert command(tmp_path, [sound()], tmp_path / "out") == 1
        assert said in capsys.readouterr().err


def test_a_model_whose_outputs_have_a_matrix_of_their_own(
    sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """whisper's model has one for both: texts would be others."""
    host = hosts_whisper()
    host.config.tie_word_embeddings = False
    host.proj_out.weight = torch.nn.Parameter(host.proj_out.weight.detach().clone())
    host.save_pretrained(tmp_path / "same")
    load.load(str(tmp_path / "same"), "cpu")
    with torch.no_grad():
        host.proj_out.weight.mul_(-1)
    host.save_pretrained(tmp_path / "own")
    assert command(tmp_path / "own", [sound()], tmp_path / "out") == 1
    assert "has another matrix for its outputs than for its tokens" in capsys.readouterr().err


def test_progress_in_seconds_of_sound(checkpoint: Path, sound: Any) -> None:
    stream = io.StringIO()
    progress = AudioProgress(62.0, stream=stream)
    model = load.load(str(checkpoint), "cpu")
    seen: list[float] = []
    progress.update = lambda *_: seen.append(progress.seconds)  # type: ignore[method-assign]
    samples = audio.read(sound(seconds=62.0)).samples
    options = {"language": "en", "temperature": 0.0, "fp16": False}
    together.transcribe_all(model, [together.Recording(samples, options, progress.advance)], 1)
    assert len(seen) > 2 and seen == sorted(seen) and seen[-1] == pytest.approx(62.0)
    assert progress.line(31.0) == "1:02 / 1:02 (100%), 2.0 s of sound a second, 0:00 left"
    assert AudioProgress(None).line(2.0) == "0:00, 0.0 s of sound a second"
