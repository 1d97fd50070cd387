"""`fastgen-transcribe` on pipes and files that are cut off, and resumed with other models or from other folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import wave
from pathlib import Path
from typing import Any

import pytest
from transcribe_kit import QUICK, command, contents, hosts_whisper

from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.journal import NAME

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.fixture
def host_folder(tmp_path: Path) -> Path:
    """A model as transformers saves it."""
    hosts_whisper().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no names in folders there")
def test_a_pipe_with_a_name_is_read_once(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And transcribed anew by each run: what it will hold is not known."""
    file, pipe, out = sound(seconds=3.0), tmp_path / "pipe.wav", tmp_path / "out"
    os.mkfifo(pipe)
    assert command(checkpoint, [file], out, *QUICK) == 0

    def write() -> None:
        data = file.read_bytes()
        while not is_over.is_set():  # whoever reads again finds nothing, and does not wait
            with contextlib.suppress(BrokenPipeError):
                pipe.write_bytes(data)
            data = b""

    for flags in ((), ("--resume",)):
        is_over, writer = threading.Event(), threading.Thread(target=write, daemon=True)
        writer.start()
        code = command(checkpoint, [pipe], out, *QUICK, *flags)
        is_over.set()
        while writer.is_alive():
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # lets it go
            writer.join(0.1)
        assert code == 0
        assert contents(out)["pipe.txt"] == contents(out)["a.txt"]
    assert "nothing to resume" not in capsys.readouterr().err


def test_a_file_that_is_cut_off(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there of it is transcribed, and one sentence says so."""
    file, half = sound(seconds=4.0), sound("half.wav", 2.0)
    file.write_bytes(file.read_bytes()[: half.stat().st_size])
    with wave.open(str(half), "wb") as out:
        out.setparams((1, 2, audio.RATE, 0, "NONE", ""))
        out.writeframes(file.read_bytes()[44:])
    assert command(checkpoint, [file, half], tmp_path / "out", *QUICK) == 0
    sentence = f"{file} is cut off: it says that it has 4.0 seconds of sound, and 2.0 are there; what is there is "
    assert capsys.readouterr().err == f"{sentence}transcribed.\n"
    assert contents(tmp_path / "out")["a.txt"] == contents(tmp_path / "out")["half.txt"]


def test_a_model_that_has_changed(
    sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], host_folder: Path
) -> None:
    """A run is not resumed with other weights in the same folder; outputs may lie in that folder, too."""
    flags = (*QUICK, "--resume")
    out = host_folder
    assert command(host_folder, [sound("a.wav", 1.0)], out, *flags) == 0
    assert command(host_folder, [sound("b.wav", 1.0)], out, *flags) == 0
    (host_folder / "README.md").write_text("This says nothing of the weights.")
    assert command(host_folder, [tmp_path / "a.wav", tmp_path / "b.wav"], out, *flags) == 0
    assert "nothing to resume" in capsys.readouterr().err
    (weights,) = host_folder.glob("*.safetensors")
    for file in (weights, host_folder / "generation_config.json"):
        before = os.stat(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert command(host_folder, [tmp_path / "a.wav"], out, *flags) == 1
        assert f"the run was begun with another content of {file}" in capsys.readouterr().err
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_runs_that_are_started_in_other_folders(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name there is another file, and another name may be the same file, or the same model."""
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        sound(f"{name}/a.wav", 1.0 + number, seed=number)
    out, flags = tmp_path / "out", (*QUICK, "--resume")
    shutil.copy(checkpoint, tmp_path / "tiny.pt")
    monkeypatch.chdir(tmp_path / "one")
    assert command(Path("../tiny.pt"), ["a.wav"], out, *flags) == 0
    before = contents(out)
    monkeypatch.chdir(tmp_path / "two")
    assert command(tmp_path / "tiny.pt", ["a.wav"], out, *flags) == 1
    assert f"{out}/a.txt exists; --overwrite replaces it." in capsys.readouterr().err
    assert contents(out) == before
    monkeypatch.chdir(tmp_path)
    assert command(Path("tiny.pt"), ["./one/../one/a.wav"], out, *flags) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_a_journal_that_does_not_say_in_which_folders_files_are(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sound(seconds=1.0), tmp_path / "out"
    assert command(checkpoint, [file], out, *QUICK) == 0
    (out / NAME).write_text((out / NAME).read_text().replace(json.dumps(str(file)), '"a.wav"'))
    assert command(checkpoint, [file], out, *QUICK, "--resume") == 1
    assert f"Cannot resume: {out / NAME} does not say in which folders its files are" in capsys.readouterr().err
    assert command(checkpoint, [file], out, *QUICK) == 1
    assert f"{out}/a.txt exists; --overwrite replaces it." in capsys.readouterr().err
    assert command(checkpoint, [file], out, *QUICK, "--overwrite") == 0
    assert command(checkpoint, [file], out, *QUICK, "--resume") == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_outputs_that_another_file_has_taken(
    checkpoint: Path, sound: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two files that are called alike the outputs are the last one's: no resumed run of the other replaces them."""
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        sound(f"{name}/a.wav", 1.0, seed=number)
    first, second, out = tmp_path / "one" / "a.wav", tmp_path / "two" / "a.wav", tmp_path / "out"
    assert command(checkpoint, [first], out, *QUICK) == 0
    assert command(checkpoint, [second], out, *QUICK, "--overwrite") == 0
    before = contents(out)
    assert command(checkpoint, [first], out, *QUICK, "--resume") == 1
    assert f"{out}/a.txt exists; --overwrite replaces it." in capsys.readouterr().err
    assert contents(out) == before
    assert command(checkpoint, [second], out, *QUICK, "--resume") == 0
    assert "nothing to resume" in capsys.readouterr().err
    assert command(checkpoint, [first], out, *QUICK, "--overwrite") == 0
    assert command(checkpoint, [first], out, *QUICK, "--resume") == 0
    assert "nothing to resume" in capsys.readouterr().err
