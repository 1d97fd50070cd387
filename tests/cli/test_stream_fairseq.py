"""fastgen-generate --stream: standard input to standard output, word by word, with a model of fairseq."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import torch
from fairseq_cli import interactive
from streamed_lines import Pieces, answered

import fastgen
from fastgen.cli import generate
from fastgen.pipeline.fairseq import streaming

CHANCE = random.Random(4)
TEXTS = [" ".join(f"w{CHANCE.randrange(60)}" for _ in range(CHANCE.randrange(1, 9))) for _ in range(6)]


@pytest.fixture
def flags(data: Path, model: Path) -> list[str]:
    return [str(data), "--path", str(model), "--cpu", "--max-len-b", "12", "--post-process", "@@ "]


def stock(texts: list[str], *flags: object) -> list[str]:
    """What fairseq-interactive writes in its D lines, one input at a time."""
    arguments = [str(flag) for flag in flags]
    output = io.StringIO()
    with (
        fastgen.disabled(),
        pytest.MonkeyPatch.context() as patch,
        torch.serialization.safe_globals([argparse.Namespace]),
        contextlib.redirect_stdout(output),
    ):
        patch.setattr(interactive, "buffered_read", lambda *_: ([text.strip()] for text in texts))
        with generate._command_line(arguments):
            interactive.cli_main()
    lines = [line.split("\t") for line in output.getvalue().splitlines() if line.startswith("D-")]
    return [fields[2] for fields in lines]


def streamed(lines: str, *flags: object) -> tuple[int, Pieces]:
    return answered(lines, lambda: generate.main([str(flag) for flag in (*flags, "--stream")]))


@pytest.mark.parametrize("more", [["--beam", "1"], ["--beam", "4"], ["--beam", "3", "--lenpen", "0", "--min-len", "6"]])
def test_each_line_is_answered_as_stock_does(flags: list[str], more: list[str]) -> None:
    code, output = streamed("".join(f" {text} \n" for text in TEXTS), *flags, *more)
    assert code == 0
    found = stock(TEXTS, *flags, *more)
    assert output.getvalue().splitlines() == found
    assert [call.tier for call in fastgen.status().calls[-len(TEXTS) :]] == ["fast"] * len(TEXTS)
    assert len(output.pieces) > 2 * len(TEXTS), "words come one by one"
    assert len(set(found)) > 1 and sum(len(text.split()) for text in found) > 3 * len(TEXTS)


def test_blank_lines_are_answered_by_blank_ones(flags: list[str]) -> None:
    code, output = streamed(f"{TEXTS[0]}\n\n  \n{TEXTS[0]}", *flags)
    first, *blank, last = output.getvalue().splitlines()
    assert (code, blank) == (0, ["", ""]) and first == last == stock(TEXTS[:1], *flags)[0]


class _Punctuation:
    """A tokenizer whose text of a word changes when the next word comes, as with Moses'."""

    def encode(self, text: str) -> str:
        return text

    def decode(self, text: str) -> str:
        return text.replace(" w1", ",w1")


@pytest.fixture
def with_tokenizer() -> Iterator[None]:
    load = streaming.load_for_lines

    def loaded(*args: Any) -> Any:
        found = load(*args)
        found.task.build_tokenizer = lambda _: _Punctuation()
        object.__setattr__(found.form, "tokenizer", _Punctuation())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "load_for_lines", loaded)
        yield


def test_a_tokenizer_that_joins_words(flags: list[str], with_tokenizer: None) -> None:
    code, output = streamed("".join(f"{text}\n" for text in TEXTS), *flags)
    wanted = [text.replace(" w1", ",w1") for text in stock(TEXTS, *flags)]
    assert code == 0 and output.getvalue().splitlines() == wanted


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--nbest", "2"], "--stream writes one line for each input: leave out --nbest."),
        (["--results-path", "out"], "--results-path is for data: leave it out with --stream"),
        (["--prefix-size", "1"], "--prefix-size is for data"),
        (["--score-reference"], "--score-reference is for data"),
        (["--constraints"], "--constraints is for data"),
        (["--batch-size", "auto"], "--batch-size auto and --max-tokens auto is for data"),
        (["--allowed-outputs", "x"], "--stream needs plain beam search, which --allowed-outputs is not"),
        (
            ["--sampling", "--beam", "1"],
            "fastgen.stream needs fastgen's own beam search: the search is Sampling",
        ),
        (["--diverse-beam-groups", "2", "--beam", "4"], "Line 1: fastgen.stream needs fastgen's own beam search"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(
    flags: list[str],
    arguments: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n"))
    assert generate.main([*flags, *arguments, "--stream"]) == 1
    assert why in capsys.readouterr().err


def test_lines_that_cannot_be_used(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "w1 " * 80
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXTS[0]}\n{long}\n"))
    assert generate.main([*flags, "--stream"]) == 1
    said = capsys.readouterr()
    assert "Line 2 has 81 tokens, and the model has room for 64." in said.err
    assert said.out == stock(TEXTS[:1], *flags)[0] + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff\n"), "utf-8", errors="strict"))
    assert generate.main([*flags, "--stream"]) == 1
    assert "Line 1 is not UTF-8." in capsys.readouterr().err


def test_a_search_that_is_not_accelerated(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n"))
    with fastgen.configured(tier="stock"):
        assert generate.main([*flags, "--stream"]) == 1
    assert "Line 1: fastgen.stream needs fastgen's own beam search" in capsys.readouterr().err
