"""`--allowed-outputs FILE` of fastgen-generate: fairseq's own search, which asks the trie."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit

import fastgen
from fastgen.cli import generate

WORDS = [f"w{i}@@" if i % 3 == 0 else f"w{i}" for i in range(60)]
OUTPUTS = [f"{first} {WORDS[5]} {last}" for first in WORDS for last in WORDS[::7]]


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    path = tmp_path / "allowed.txt"
    path.write_text("".join(f"{line}\n\n" for line in OUTPUTS), "utf-8")
    return path


@pytest.mark.parametrize("more", [[], ["--nbest", "2", "--lenpen", "0"]])
def test_outputs_are_among_them(job: list[str], allowed: Path, more: list[str]) -> None:
    flags = [*job, "--beam", "3", "--workers", "0", "--allowed-outputs", allowed, *more]
    ours = fairseq_kit.run_fastgen(*flags)
    assert fastgen.status().calls
    with fastgen.disabled():
        stock = fairseq_kit.run_fastgen(*flags)
    assert fairseq_kit.differences(stock, ours) == []
    best = [line.split("\t") for line in ours if line.startswith("H-")]
    assert len(best) >= fairseq_kit.SENTENCES
    assert {text for _, score, text in best if score != "-inf"} <= set(OUTPUTS)
    assert len({text for _, _, text in best}) > 1


def test_refusals(job: list[str], allowed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*more: object) -> str:
        flags = [*job, "--workers", "0", "--allowed-outputs", allowed, *more]
        assert generate.main([str(flag) for flag in flags]) == 1
        return capsys.readouterr().err

    assert "is for plain beam search, and not for this task or these flags" in refused(
        "--sampling", "--beam", "2", "--nbest", "2"
    )
    allowed.write_text("w1\nw2 zebra\n", "utf-8")
    assert "line 2 has the word 'zebra', which the dictionary lacks" in refused()
    allowed.write_text("\n", "utf-8")
    assert "A trie needs at least one sequence." in refused()
    allowed.unlink()
    assert f"Cannot use --allowed-outputs {allowed}: " in refused()
