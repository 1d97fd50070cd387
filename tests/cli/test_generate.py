"""fastgen-generate against fairseq-generate on tiny random models: the same lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq_kit import SENTENCES

import fastgen
from fastgen.cache.tree import BeamTree

MATRIX: dict[str, list[str]] = {
    "beam 1": ["--beam", "1"],
    "beam 4, subwords joined": ["--beam", "4", "--remove-bpe"],
    "beam 8, n-best 4": ["--beam", "8", "--nbest", "4"],
    "length penalty 0": ["--beam", "4", "--lenpen", "0"],
    "length penalty 2": ["--beam", "4", "--lenpen", "2.0"],
    "unnormalised": ["--beam", "4", "--unnormalized"],
    "prefix": ["--beam", "4", "--prefix-size", "2"],
    "sampling": ["--sampling", "--sampling-topk", "10", "--seed", "7", "--beam", "4", "--nbest", "4"],
    "hard alignment": ["--beam", "4", "--print-alignment", "--remove-bpe"],
    "soft alignment": ["--beam", "2", "--print-alignment", "soft"],
    "reference scored": ["--score-reference"],
    "batches of multiples, the rest dropped": ["--beam", "2", "--required-batch-size-multiple", "8"],
    "quiet": ["--beam", "2", "--quiet"],
    "sacrebleu": ["--beam", "2", "--scoring", "sacrebleu", "--remove-bpe"],
    "chrf": ["--beam", "2", "--scoring", "chrf", "--remove-bpe"],
    "word error rate": ["--beam", "2", "--scoring", "wer"],
    "diverse siblings": ["--beam", "4", "--diversity-rate", "0.5"],
    "a shard": ["--beam", "2", "--distributed-world-size", "3", "--distributed-rank", "1"],
    "batches of 5": ["--beam", "2", "--batch-size", "5"],
    "loaded by a process": ["--beam", "2", "--num-workers", "1"],
    "sampling, loaded by a process": ["--sampling", "--seed", "7", "--beam", "2", "--nbest", "2", "--num-workers", "1"],
}


@pytest.mark.parametrize("flags", MATRIX.values(), ids=MATRIX.keys())
def test_the_lines_are_stocks(job: list[str], flags: list[str]) -> None:
    if "chrf" in flags or "sacrebleu" in flags:
        pytest.importorskip("sacrebleu")
    if "wer" in flags:
        pytest.importorskip("editdistance")
    stock = fairseq_kit.run_stock(*job, *flags)
    ours = fairseq_kit.run_fastgen(*job, *flags, "--workers", "0")
    assert fairseq_kit.differences(stock, ours) == []
    assert "--quiet" in flags or len(stock) > 5 * 10
    assert fastgen.status().calls or flags == ["--score-reference"]  # which needs no search


def test_a_frozen_ancestry_is_seen(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparisons here."""
    stock = fairseq_kit.run_stock(*job, "--beam", "4")
    monkeypatch.setattr(BeamTree, "reorder", lambda self, parents: None)
    assert fairseq_kit.differences(stock, fairseq_kit.run_fastgen(*job, "--beam", "4", "--workers", "0"))


def test_steps_and_history_of_a_model_that_refines(data: Path, tmp_path: Path) -> None:
    model = fairseq_kit.write_checkpoint(tmp_path / "cmlm.pt", data, arch="cmlm_transformer", task="translation_lev")
    flags = [data, "--path", model, "--task", "translation_lev", "--iter-decode-max-iter", "3", "--cpu", "--beam", "1",
             "--iter-decode-force-max-iter", "--print-step", "--retain-iter-history", "--max-tokens", "60",
             "--no-progress-bar", "--remove-bpe", "--num-workers", "0"]  # fmt: skip
    stock = fairseq_kit.run_stock(*flags)
    assert fairseq_kit.differences(stock, fairseq_kit.run_fastgen(*flags, "--workers", "0")) == []
    assert {line[:2] for line in stock} == {"S-", "T-", "H-", "D-", "P-", "I-", "E-", "Ge"}


def test_an_ensemble(job: list[str], data: Path, model: Path) -> None:
    second = fairseq_kit.write_checkpoint(data.parent / "second.pt", data, seed=1)
    flags = [*job, "--beam", "4", "--path", f"{model}:{second}"]
    stock = fairseq_kit.run_stock(*flags)
    assert fairseq_kit.differences(stock, fairseq_kit.run_fastgen(*flags, "--workers", "0")) == []
    assert stock != fairseq_kit.run_stock(*job, "--beam", "4")


def test_worker_processes_change_nothing(job: list[str]) -> None:
    flags = [*job, "--beam", "4", "--nbest", "2", "--remove-bpe"]
    alone = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    assert fairseq_kit.run_fastgen(*flags, "--workers", "2") == alone


def test_results_path_takes_everything_off_standard_output(job: list[str], tmp_path: Path) -> None:
    stock = fairseq_kit.run_stock(*job, "--beam", "2")
    assert fairseq_kit.run_fastgen(*job, "--beam", "2", "--results-path", tmp_path, "--workers", "0") == []
    text = (tmp_path / "generate-test.txt").read_text("utf-8")
    assert fairseq_kit.differences(stock, fairseq_kit.result_lines(text)) == []
    assert sorted(os.listdir(tmp_path)) == ["generate-test.txt", "generate-test.txt.journal"]


def test_log_lines_are_stocks(job: list[str]) -> None:
    """Run as commands: what fairseq-generate logs, fastgen-generate logs in the same order and to the same stream."""
    code = "import argparse, torch; torch.serialization.add_safe_globals([argparse.Namespace])\nimport fastgen\n"
    sides = []
    for module, call in (("fairseq_cli.generate", "cli_main"), ("fastgen.cli.generate", "main")):
        process = subprocess.run(
            [sys.executable, "-c", f"{code}fastgen.disable()\nfrom {module} import {call} as run\nrun()", *job],
            env=fairseq_kit.environment(), capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found = [re.findall(r"INFO(?:\s*[:|]\s*)(fairseq[\w.]*)(?:\s*[:|]\s*)(.*)", text)
                 for text in (process.stdout, process.stderr)]  # fmt: skip
        sides.append([[(name, re.sub(r" in [\d.]+s .*", "", text)) for name, text in stream] for stream in found])
    stock, ours = sides
    # Before its main, where a task is imported, fairseq logs to whatever there is.
    stock[1] = [entry for entry in stock[1] if entry[0] != "fairseq.tasks.text_to_speech"]
    ours[1] = [entry for entry in ours[1] if entry[0] != "fairseq.tasks.text_to_speech"]
    assert stock == ours
    assert sum(map(len, stock)) > 5


def test_diverse_beam_groups_do_not_crash(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fairseq_kit.run_fastgen(*job, "--beam", "4", "--diverse-beam-groups", "2", "--workers", "0")
    assert sum(line.startswith("H-") for line in lines) == SENTENCES
    # Stock's search, given positions in the batch instead of dataset ids.
    real = FairseqTask.inference_step

    def without_ids(self: Any, generator: Any, models: Any, sample: Any, **options: Any) -> Any:
        return real(self, generator, models, {k: v for k, v in sample.items() if k != "id"}, **options)

    monkeypatch.setattr(FairseqTask, "inference_step", without_ids)
    stock = fairseq_kit.run_stock(*job, "--beam", "4", "--diverse-beam-groups", "2")
    assert fairseq_kit.differences(stock, lines) == []


def test_the_comparison_sees_what_differs(job: list[str]) -> None:
    lines = fairseq_kit.run_stock(*job, "--beam", "2")
    assert fairseq_kit.differences(lines, lines[:-1])
    assert fairseq_kit.differences(lines, [lines[1], lines[0], *lines[2:]])
    for mark, change in (("H-", lambda x: x + 2e-4), ("D-", lambda x: x - 2e-4)):
        i = next(i for i, line in enumerate(lines) if line.startswith(mark))
        name, score, text = lines[i].split("\t")
        near = [*lines[:i], f"{name}\t{float(score) + 5e-5}\t{text}", *lines[i + 1 :]]
        far = [*lines[:i], f"{name}\t{change(float(score))}\t{text}", *lines[i + 1 :]]
        assert not fairseq_kit.differences(lines, near) and fairseq_kit.differences(lines, far)
