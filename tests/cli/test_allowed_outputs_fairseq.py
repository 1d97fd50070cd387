"""`--allowed-outputs FILE` of fastgen-generate: fairseq's own search, which asks the trie."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
import torch

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
    allowed.write_text("w1 </s>\n\nw1 </s> w2\n", "utf-8")
    assert f"Cannot use --allowed-outputs {allowed}: line 3 has the word '</s>', which ends an output." in refused()
    allowed.write_text("w1\nw2 <pad>\n", "utf-8")
    assert "line 2 has the word '<pad>', which no search writes." in refused()
    allowed.write_bytes(b"w1\n\xff\n")
    assert f"{allowed}, line 2 is not UTF-8." in refused()
    allowed.write_text("\n", "utf-8")
    assert "A trie needs at least one sequence." in refused()
    allowed.unlink()
    assert f"Cannot use --allowed-outputs {allowed}: " in refused()


def test_a_sentence_in_which_no_output_ends_in_time(
    job: list[str], allowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long sources get too few tokens for any output: the line is named, and what was written is kept."""
    flags = [*job, "--beam", "3", "--workers", "0", "--allowed-outputs", allowed]
    whole = fairseq_kit.run_fastgen(*flags)
    results = tmp_path / "results"
    few = ["--max-len-a", "-0.5", "--max-len-b", "8", "--results-path", results]
    assert generate.main([str(flag) for flag in [*flags, *few]]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fastgen-generate: ")]
    named = re.search(
        r"^fastgen-generate: Line (\d+) of the subset test \(S-(\d+)\) has no hypothesis, as none of --allowed-outputs "
        r"came to its end within the tokens that --max-len-a and --max-len-b allow for it: raise --max-len-b\.$",
        said,
    )
    assert named is not None and int(named[1]) == int(named[2]) + 1, said
    written = fairseq_kit.result_lines((results / "generate-test.txt").read_text("utf-8"))
    count = len([line for line in written if line.startswith("S-")])
    assert 0 < count < fairseq_kit.SENTENCES
    assert not [line for line in written if line.startswith(f"S-{named[2]}\t")]
    assert fairseq_kit.differences(whole[: len(written)], written) == []


class Generator:
    """Finds nothing for the second sentence, as fairseq's search may."""

    model = SimpleNamespace(models=[])

    def generate(self, models: list[Any], sample: dict[str, Any]) -> list[list[dict[str, Any]]]:
        return [[{"tokens": torch.tensor([5, 2])}], []]


def test_samples_without_a_hypothesis(capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator()
    first, second = fastgen.generate_samples(generator, [{}, {}], progress=True)
    assert first[1] == second[1] == [] and first[0][0]["tokens"].tolist() == [5, 2]


def test_no_output_is_written_twice(job: list[str], allowed: Path) -> None:
    """fairseq goes on with beams that have ended, which may end again if the end may follow the end."""
    allowed.write_text("".join(f"{word}\n" for word in WORDS[:12]), "utf-8")
    lines = fairseq_kit.run_fastgen(
        *job, "--beam", "4", "--nbest", "4", "--workers", "0", "--lenpen", "2", "--allowed-outputs", allowed
    )
    outputs: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("H-"):
            sentence, _, text = line.split("\t")
            outputs.setdefault(sentence, []).append(text)
    assert len(outputs) == fairseq_kit.SENTENCES
    assert all(len(set(texts)) == len(texts) == 4 and set(texts) <= set(WORDS[:12]) for texts in outputs.values())
