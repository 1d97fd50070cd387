"""fastgen-generate-transformers --refill: the same files, with waiting records in the places of finished ones."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import joint_steps
import kill_kit
import pytest
import torch
from transformers_kit import FLAGS, MODEL, run, stock

import fastgen
from fastgen.optimizer.transformers.generate import batch_decoder
from fastgen.pipeline import batching
from fastgen.pipeline.resume import journal_path
from fastgen.pipeline.transformers import batches, generation

REFILL = ["--refill", "on"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    return joint_steps.watch(monkeypatch)


def was_refilled(spans: list[list[tuple[int, int]]]) -> bool:
    return any(len({position for _, position in step}) > 1 for step in spans)


def test_text_is_stocks_and_the_batch_is_kept_full(
    source: Path, texts: list[str], tmp_path: Path, spans: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in FLAGS if flag != "--quiet"]
    assert run(MODEL, source, tmp_path / "plain.txt", *FLAGS) == 0
    assert not spans, "on a CPU it is off unless asked for"
    assert run(MODEL, source, tmp_path / "out.txt", *flags, *REFILL) == 0
    assert was_refilled(spans) and max(sum(rows for rows, _ in step) for step in spans) == 5 * 3
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "plain.txt").read_bytes()
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == stock(texts)[0]
    assert [(call.tier, call.batch) for call in fastgen.status().calls[-1:]] == [("fast", len(texts))]
    assert "23 / 23 (100%)" in capsys.readouterr().err


def test_jsonl_has_all_hypotheses_scores_and_errors(source: Path, texts: list[str], tmp_path: Path, spans: Any) -> None:
    lines = [*[text.encode() for text in texts[:9]], b"\xff", b"", *[text.encode() for text in texts[9:]]]
    source.write_bytes(b"".join(line + b"\n" for line in lines))
    flags = [*FLAGS, "--num-return-sequences", 2]
    assert run(MODEL, source, tmp_path / "out.jsonl", *flags, *REFILL) == 1
    assert was_refilled(spans)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [entry["line"] for entry in found] == list(range(1, len(lines) + 1))
    assert "error" in found.pop(9) and found.pop(9)["outputs"] == [{"text": ""}] * 2
    wanted, scores = stock(texts, num_return_sequences=2)
    assert [output["text"] for entry in found for output in entry["outputs"]] == wanted
    assert [output["score"] for entry in found for output in entry["outputs"]] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("size", [["--max-tokens", "60"], ["--max-tokens", "auto"], ["--batch-size", "auto"]])
def test_other_sizes(
    source: Path, texts: list[str], tmp_path: Path, spans: Any, monkeypatch: pytest.MonkeyPatch, size: list[str]
) -> None:
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 2)
    monkeypatch.setattr(batches, "AUTO_TOKENS", 32)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 1e9)  # here the clock would decide: automatic sizes grow once
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS[:-2], *size, *REFILL) == 0
    assert was_refilled(spans)
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == stock(texts)[0]


@pytest.mark.parametrize("flags", [["--num-beams", "1"], ["--do-sample", "--seed", "3"], ["--use-cache", "false"]])
def test_what_cannot_be_refilled_runs_batch_by_batch_and_says_so(
    source: Path, tmp_path: Path, spans: Any, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(MODEL, source, tmp_path / "plain.jsonl", *FLAGS, *flags) == 0
    assert capsys.readouterr().err == ""
    assert run(MODEL, source, tmp_path / "out.jsonl", *FLAGS, *flags, *REFILL) == 0
    assert "batch by batch, without refill: " in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert not spans


def test_flags_that_transformers_refuses_are_one_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--num-return-sequences", 9, *REFILL) == 1
    assert "transformers refuses" in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize("size", ["6", "auto"])
def test_out_of_memory_while_the_batch_is_kept_full_loses_and_repeats_nothing(
    source: Path,
    texts: list[str],
    tmp_path: Path,
    spans: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: str,
) -> None:
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 4)
    monkeypatch.setattr(batches, "STRETCH", 2)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 1e9)
    step, done = batch_decoder.BatchDecoder.step, []

    def short(self: Any, inputs: dict[str, Any]) -> Any:
        if len(spans) == 30:
            spans.append([])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, inputs)

    real = generation.Generator._done
    monkeypatch.setattr(batch_decoder.BatchDecoder, "step", short)
    monkeypatch.setattr(
        generation.Generator, "_done", lambda self, found: (done.append((len(spans), len(found))), real(self, found))[1]
    )
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS[:-1], size, *REFILL) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == stock(texts)[0]
    assert "out of memory while" in capsys.readouterr().err
    assert sum(count for _, count in done) == len(texts)
    assert sum(count for steps, count in done if steps < 30) > 0, "nothing was done before"
    assert was_refilled(spans[31:]) == (size == "auto"), "with a fixed size it would run out again"


def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in 2 * texts), "utf-8")
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    monkeypatch.setattr(batches, "WINDOW", 23)
    monkeypatch.setattr(batches, "STRETCH", 2)
    common = [*FLAGS[:-1], "2", *REFILL]
    assert run(MODEL, source, whole, *common) == 0
    step = batch_decoder.BatchDecoder.step
    with monkeypatch.context() as patch:
        pause = kill_kit.PAUSE / 10

        def slowed(self: Any, inputs: Any) -> Any:
            time.sleep(pause)
            return step(self, inputs)

        patch.setattr(batch_decoder.BatchDecoder, "step", slowed)
        kills = kill_kit.kill_at_random(
            lambda: run(MODEL, source, out, *common, "--resume"), journal_path(out), kills=10, seed=5
        )
    assert kills == 10
    assert run(MODEL, source, out, *common, "--resume") == 0
    assert out.read_bytes() == whole.read_bytes()
