"""fastgen-generate-transformers MODEL - - --stream: standard input to standard output, word by word."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_lines import Pieces, answered
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers_kit import MODEL, run

import fastgen
from fastgen.demo import task
from fastgen.pipeline.transformers import streaming

FLAGS = ["--stream", "--max-new-tokens", "24", "--device", "cpu"]


def stock(texts: Sequence[str], beams: int = 3, **options: Any) -> list[str]:
    """Texts, one input at a time by stock transformers."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    with fastgen.disabled():
        inputs = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        tokens = [model.generate(each, num_beams=beams, max_new_tokens=24, **options)[0] for each in inputs]
    return list(tokenizer.batch_decode(tokens, skip_special_tokens=True))


def streamed(lines: str, *flags: object) -> tuple[int, Pieces]:
    return answered(lines, lambda: run(MODEL, "-", "-", *FLAGS, *flags))


def test_among_allowed_outputs(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("Zimmer 12\nZimmer 13\nBus 7 um 14:05\nBus 8 um 14:05\n", "utf-8")
    texts = ["room 12", "bus 7 at 14:05"]
    code, output = streamed("".join(f"{text}\n" for text in texts), "--num-beams", 3, "--allowed-outputs", allowed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trie = fastgen.Trie.from_file(allowed, tokenizer=tokenizer)
    assert code == 0
    assert output.getvalue().splitlines() == stock(texts, prefix_allowed_tokens_fn=trie)
    assert [call.tier for call in fastgen.status().calls[-2:]] == ["fast"] * 2


@pytest.mark.parametrize("beams", [1, 3])
def test_each_line_is_answered_as_stock_does(beams: int) -> None:
    texts = [next(task.sentences(seed, held_out=True))[0] for seed in range(5)]
    code, output = streamed("".join(f"{text}\n" for text in texts), "--num-beams", beams)
    assert code == 0
    assert output.getvalue().splitlines() == stock(texts, beams)
    assert len(output.pieces) > 4 * len(texts), "words come one by one"
    if beams > 1:
        assert [call.tier for call in fastgen.status().calls[-5:]] == ["fast"] * 5


def test_a_blank_line_is_answered_by_one() -> None:
    code, output = streamed("room 12\n\n  \nroom 12", "--num-beams", 3)
    first, *blank, last = output.getvalue().splitlines()
    assert (code, blank) == (0, ["", ""]) and first == last == stock(["room 12"])[0]


def test_samples_are_those_of_the_seed() -> None:
    found = [
        streamed("order 4213\n", "--do-sample", "--temperature", 3.0, "--seed", seed)[1].getvalue()
        for seed in (3, 3, 4)
    ]
    assert found[0] == found[1] != found[2]
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["in.txt", "-", "--stream"], "--stream reads standard input and writes standard output: give - for INPUT"),
        (["-", "out.txt", "--stream"], "--stream reads standard input and writes standard output: give - for INPUT"),
        (["-", "-", "--stream", "--resume"], "--resume is for files: leave it out with --stream."),
        (["-", "-", "--stream", "--ray"], "--ray is for files"),
        (["-", "-", *FLAGS, "--num-beams", 3, "--num-return-sequences", 2], "leave out --num-return-sequences"),
        (["-", "-"], "- stands for a pipe"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(
    arguments: list[Any], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("room 12\n"))
    assert run(MODEL, *arguments) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("beams", [1, 3])
def test_a_text_without_spaces_comes_in_pieces(beams: int) -> None:
    decoded = streaming._Answers._decoded
    text = "before 17:08, page 12, order 4213"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming._Answers, "_decoded", lambda self, tokens: decoded(self, tokens).replace(" ", ""))
        code, output = streamed(f"{text}\n", "--num-beams", beams)
    assert (code, output.getvalue()) == (0, stock([text], beams)[0].replace(" ", "") + "\n")
    assert len([piece for piece in output.pieces if piece.strip()]) > 4


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of locales
def test_a_line_that_is_not_utf8(
    errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"room 12\nroom \xff\n"), "utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", lines)
    assert run(MODEL, "-", "-", *FLAGS) == 1
    said = capsys.readouterr()
    assert said.err.endswith("Line 2 is not UTF-8.\n") and said.out == stock(["room 12"], 1)[0] + "\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])  # of Windows, where standard input is a file; of locales
def test_lines_are_utf8_whatever_the_locale(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And end as those of a file do; a byte order mark is none of the first."""
    texts = ["costs €17.05", "room 12\rroom 13", "order 4213"]
    given = io.BytesIO("\ufeff{}\r\n{}\n\n{}".format(*texts).encode())
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding, newline="\n", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(given, encoding))
        patch.setattr(sys, "stdout", output)
        decoded = streaming._Answers._decoded
        patch.setattr(streaming._Answers, "_decoded", lambda self, tokens: decoded(self, tokens).replace("euros", "€"))
        assert run(MODEL, "-", "-", *FLAGS, "--num-beams", 3) == 0
    first, second, third = stock(texts)
    assert "euros" in first
    assert written.getvalue().decode() == f"{first.replace('euros', '€')}\n{second}\n\n{third}\n"


def test_a_call_that_is_not_accelerated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("room 12\n"))
    with fastgen.configured(tier="stock"):
        assert run(MODEL, "-", "-", *FLAGS, "--num-beams", 3) == 1
    assert "Line 1: `streamer` cannot be used with beam search" in capsys.readouterr().err


def test_a_line_that_is_too_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("room 12\n" + "1 " * 3000 + "\n"))
    assert run(MODEL, "-", "-", *FLAGS) == 1
    said = capsys.readouterr()
    assert "Line 2 has" in said.err and "--truncate cuts it" in said.err
    assert said.out.splitlines()[0] == stock(["room 12"], 1)[0]
