"""`--allowed-outputs FILE` of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the command needs transformers")

import torch
import transformers_kit as kit
from transformers import AutoTokenizer

import fastgen
from fastgen import Trie

TEXTS = ["bus 7 at 14:05", "room 12", "costs $17.20"]
ALLOWED = ["Bus 7 um 14:05", "Zimmer 12", "kostet 17,20 $", "Zimmer 13", "Haus"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    source, output, allowed = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "allowed.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS), "utf-8")
    allowed.write_text("".join(f"{text}\n" for text in ALLOWED), "utf-8")
    return source, output, allowed


@pytest.mark.parametrize("refill", ["on", "off"])
def test_outputs_are_among_them(files: tuple[Path, Path, Path], refill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output, allowed = files
    asked: list[bool] = []
    call = Trie.__call__

    def counted(self: Trie, sentence: int, tokens: torch.Tensor) -> list[int]:
        asked.append(True)
        return call(self, sentence, tokens)

    monkeypatch.setattr(Trie, "__call__", counted)
    flags = [*kit.FLAGS, "--allowed-outputs", allowed, "--refill", refill]
    assert kit.run(kit.MODEL, source, output, *flags) == 0
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    best = [record["outputs"][0] for record in records]
    tokenizer = AutoTokenizer.from_pretrained(kit.MODEL)
    rows = tokenizer(text_target=ALLOWED).input_ids
    known = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert {one["text"] for one in best} <= set(known)
    assert not asked
    trie = Trie(rows, eos_token_id=tokenizer.eos_token_id)
    with fastgen.disabled():
        texts, scores = kit.stock(TEXTS, prefix_allowed_tokens_fn=trie)  # type: ignore[arg-type]
    assert [one["text"] for one in best] == texts
    assert [one["score"] for one in best] == pytest.approx(scores, abs=1e-4)


def test_refusals(files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output, allowed = files

    def refused(*more: object) -> str:
        assert kit.run(kit.MODEL, source, output, *kit.FLAGS, *more) == 1
        assert not output.exists()
        return capsys.readouterr().err

    assert "--allowed-outputs none.txt: there is no such file." in refused("--allowed-outputs", "none.txt")
    allowed.write_text("\n\n", "utf-8")
    assert f"Cannot use --allowed-outputs {allowed}: {allowed} holds no sequence." in refused(
        "--allowed-outputs", allowed
    )
    allowed.write_bytes(b"\xff\xfe\n")
    assert f"Cannot use --allowed-outputs {allowed}: " in refused("--allowed-outputs", allowed)
    assert "it is not for --ray" in refused("--allowed-outputs", allowed, "--ray")


def test_another_list_is_another_run(files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output, allowed = files
    flags = [*kit.FLAGS, "--allowed-outputs", allowed]
    assert kit.run(kit.MODEL, source, output, *flags) == 0
    allowed.write_text("Zimmer 12\n", "utf-8")
    assert kit.run(kit.MODEL, source, output, *flags, "--resume") == 1
    assert "allowed.txt" in capsys.readouterr().err
