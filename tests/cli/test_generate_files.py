"""The files of fastgen-generate-transformers: what is no text, names that are no UTF-8, a run in the model's folder."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers_kit import FLAGS, MODEL, run, stock

from fastgen.pipeline.transformers import generation


@pytest.mark.parametrize("output", ["out.txt", "out.jsonl"])
@pytest.mark.parametrize("kind", ["gzip", "utf-16"])
def test_an_input_that_is_no_text_is_refused_as_a_whole(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    """Some of its lines may be UTF-8, and would have an output."""
    text = source.read_text("utf-8")
    source.write_bytes(gzip.compress(text.encode()) if kind == "gzip" else text.encode(kind))
    assert run(MODEL, source, tmp_path / output, *FLAGS) == 1
    assert f"{source} is {'compressed' if kind == 'gzip' else 'UTF-16'}" in capsys.readouterr().err
    assert not (tmp_path / output).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_name_that_is_no_utf8(texts: list[str], tmp_path: Path) -> None:
    source = Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"\xff.txt"))
    source.write_bytes(f"{texts[0]}\n".encode() + b"\xff\n" + f"{texts[1]}\n".encode())
    assert run(MODEL, source, tmp_path / "out.jsonl", *FLAGS) == 1
    first, second, third = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines())
    assert [one["outputs"][0]["text"] for one in (first, third)] == stock(texts[:2])[0]
    assert "in\\udcff.txt, line 2: not UTF-8" in second["error"]


def test_a_run_in_the_folder_of_the_model(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that are not done may be corrected: the input is no file of the model's."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    given, out = folder / "in.txt", folder / "model"  # a name that the weights' begins with
    given.write_bytes(source.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(generation.Generator, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(folder, given, out, *FLAGS) == 130
    given.write_bytes(source.read_bytes() + f"{texts[0]}\n".encode())
    weights = folder / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert run(folder, given, out, *FLAGS, "--resume") == 1
    assert f"another content of {weights}; --overwrite" in capsys.readouterr().err
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run(folder, given, out, *FLAGS, "--resume") == 0
    assert out.read_text("utf-8").splitlines() == stock([*texts, texts[0]])[0]
