"""fastgen-generate --refill: the same lines, with waiting sentences in the places of finished ones."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
import kill_kit
import torch

import fastgen
from fastgen.cli import generate
from fastgen.optimizer.fairseq.generate.batch_decoder import BatchDecoder
from fastgen.pipeline import batching
from fastgen.pipeline.fairseq import batches, refilling
from fastgen.pipeline.fairseq.generation import Generation
from fastgen.pipeline.resume import journal_path

REFILL = ["--refill", "on"]
MATRIX: dict[str, list[str]] = {
    "beam 1": ["--beam", "1"],
    "beam 4, n-best 4": ["--beam", "4", "--nbest", "4", "--remove-bpe"],
    "source lengths": ["--beam", "4", "--max-len-a", "1", "--max-len-b", "2"],
    "prefix": ["--beam", "4", "--prefix-size", "2"],
    "hard alignment": ["--beam", "4", "--print-alignment", "--remove-bpe"],
    "soft alignment": ["--beam", "2", "--print-alignment", "soft"],
    "a shard": ["--beam", "2", "--distributed-world-size", "3", "--distributed-rank", "1"],
    "batches of 5": ["--beam", "2", "--batch-size", "5"],
    "loaded by a process": ["--beam", "2", "--num-workers", "1"],
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The positions that decoded together, at every joint step."""
    seen: list[set[int]] = []
    step = BatchDecoder.step

    def counted(self: BatchDecoder) -> None:
        seen.append({part.step.tokens.shape[1] for part in self.parts})
        step(self)

    monkeypatch.setattr(BatchDecoder, "step", counted)
    return seen


def was_refilled(steps: list[set[int]]) -> bool:
    return any(len(positions) > 1 for positions in steps)


@pytest.mark.parametrize("flags", MATRIX.values(), ids=MATRIX.keys())
def test_the_lines_are_stocks(job: list[str], flags: list[str], steps: list[set[int]]) -> None:
    stock = fairseq_kit.run_stock(*job, *flags)
    ours = fairseq_kit.run_fastgen(*job, *flags, *REFILL, "--workers", "0")
    assert fairseq_kit.differences(stock, ours) == []
    assert was_refilled(steps)
    assert fastgen.status().calls[-1].batch > 5


def test_on_a_cpu_it_is_off_unless_asked_for(job: list[str], steps: list[set[int]]) -> None:
    fairseq_kit.run_fastgen(*job, "--beam", "2", "--workers", "0")
    assert not steps


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--sampling", "--seed", "7", "--beam", "2", "--nbest", "2"], "Sampling may know"),
        (["--match-source-len", "--beam", "2"], "match_source_len"),
        (["--score-reference"], "SequenceScorer is not"),
    ],
)
def test_what_cannot_be_refilled_runs_batch_by_batch_and_says_so(
    job: list[str], steps: list[set[int]], capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    stock = fairseq_kit.run_stock(*job, *flags)
    ours = fairseq_kit.run_fastgen(*job, *flags, *REFILL, "--workers", "0")
    assert fairseq_kit.differences(stock, ours) == []
    assert not steps
    error = capsys.readouterr().err
    assert "batch by batch, without refill: " in error and why in error


@pytest.mark.parametrize("size", [["--batch-size", "auto"], ["--max-tokens", "auto"]], ids=" ".join)
def test_automatic_sizes(
    job: list[str], steps: list[set[int]], monkeypatch: pytest.MonkeyPatch, size: list[str]
) -> None:
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 2)
    monkeypatch.setattr(batches, "AUTO_TOKENS", 20)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 1e9)  # here the clock would decide: automatic sizes grow once
    stock = fairseq_kit.run_stock(*job, "--beam", "2")
    flags = [flag for flag in job if flag not in ("--max-tokens", "60")]
    ours = fairseq_kit.run_fastgen(*flags, *size, "--beam", "2", *REFILL, "--workers", "0")
    assert fairseq_kit.differences(fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)) == []
    assert was_refilled(steps)


@pytest.mark.parametrize("size", [["--batch-size", "6"], ["--batch-size", "auto"]], ids=" ".join)
def test_out_of_memory_while_the_batch_is_kept_full_loses_and_repeats_nothing(
    job: list[str],
    steps: list[set[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: list[str],
) -> None:
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 4)
    monkeypatch.setattr(refilling, "STRETCH", 3)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 1e9)
    flags = [flag for flag in job if flag not in ("--max-tokens", "60")]
    stock = fairseq_kit.run_stock(*flags, "--batch-size", "6", "--beam", "2")
    step, generated, done = BatchDecoder.step, Generation.generated, []

    def short(self: BatchDecoder) -> None:
        if len(steps) == 20:
            steps.append(set())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        step(self)

    def counted(self: Generation, number: int, sample: Any, *args: Any) -> Any:
        done.append((len(steps), sample["nsentences"]))
        return generated(self, number, sample, *args)

    monkeypatch.setattr(BatchDecoder, "step", short)
    monkeypatch.setattr(Generation, "generated", counted)
    ours = fairseq_kit.run_fastgen(*flags, *size, "--beam", "2", *REFILL, "--workers", "0")
    assert fairseq_kit.differences(fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)) == []
    assert "out of memory while a batch was kept full" in capsys.readouterr().err
    assert sum(count for _, count in done) == fairseq_kit.SENTENCES
    assert sum(count for before, count in done if before < 20) > 0, "nothing was done before"
    assert was_refilled(steps[21:]) == ("auto" in size), "with a fixed size it would run out again"
    assert not [thread for thread in threading.enumerate() if thread.name == "fastgen-suspended"]


def _slowed(patch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda call: None) -> None:
    """So that there is something to interrupt."""
    step, calls = BatchDecoder.step, []

    def slow(self: BatchDecoder) -> None:
        calls.append(1)
        time.sleep(kill_kit.PAUSE / 10)
        then(len(calls))
        step(self)

    patch.setattr(BatchDecoder, "step", slow)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_keeps_what_is_done_and_exits_130(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2", *REFILL]
    whole = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    flags += ["--results-path", str(tmp_path), "--workers", "1"]
    results = tmp_path / "generate-test.txt"
    with monkeypatch.context() as patch:
        _slowed(patch, then=lambda call: time.sleep(50 if call == 60 else 0))
        assert kill_kit.interrupt(lambda: generate.main(flags), journal_path(results), number) == 130
    kept = fairseq_kit.result_lines(results.read_text("utf-8"))
    assert 0 < len(kept) < len(whole) and kept == whole[: len(kept)]
    assert generate.main([*flags, "--resume"]) == 0
    assert fairseq_kit.result_lines(results.read_text("utf-8")) == whole


def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refilling, "STRETCH", 3)
    flags = [*job, "--beam", "2", "--batch-size", "2", *REFILL]
    whole = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    flags += ["--results-path", str(tmp_path), "--workers", "1", "--resume"]
    results = tmp_path / "generate-test.txt"
    with monkeypatch.context() as patch:
        _slowed(patch)
        kills = kill_kit.kill_at_random(lambda: generate.main(flags), journal_path(results), kills=10, seed=5)
    assert kills == 10
    assert generate.main(flags) == 0
    assert fairseq_kit.result_lines(results.read_text("utf-8")) == whole
