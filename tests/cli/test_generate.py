"""fastgen-generate against fairseq-generate on tiny random models; failures, memory, resume."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
import kill_kit
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.fairseq_task import FairseqTask

from fastgen.cli import fairseq_lines, fairseq_run, generate
from fastgen.pipeline import WorkerPool
from fastgen.pipeline.resume import journal_path

SENTENCES = 37


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fairseq_kit.write_data(tmp_path_factory.mktemp("fairseq") / "data-bin", SENTENCES)


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    return fairseq_kit.write_checkpoint(data.parent / "model.pt", data)


@pytest.fixture(scope="module")
def job(data: Path, model: Path) -> list[str]:
    return [str(data), "--path", str(model), "--cpu", "--num-workers", "0", "--max-tokens", "60", "--max-len-b", "12",
            "--no-progress-bar", "--required-batch-size-multiple", "1"]  # fmt: skip


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
    assert fairseq_kit.differences(stock, fairseq_kit._result_lines(text)) == []
    assert os.listdir(tmp_path) == ["generate-test.txt"]


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


# Strings.


@pytest.mark.parametrize("post_process", sorted(fairseq_lines.POST_PROCESSORS, key=str))
def test_strings_are_those_of_the_dictionary(post_process: str | None) -> None:
    dictionary = Dictionary()
    for word in ("a@@", "b", "\u2581c", "d", "\u2581", "@@", "e@@@", "x y"):
        dictionary.add_symbol(word)
    plain = fairseq_run.plain_dictionary(dictionary, post_process)
    assert isinstance(plain, fairseq_lines.Symbols)
    chance = random.Random(1)
    for _ in range(300):
        ids = [chance.randrange(len(dictionary) + 2) for _ in range(chance.randrange(9))]
        for options in ({}, {"escape_unk": True}, {"extra_symbols_to_ignore": {5, 2}}):
            wanted = dictionary.string(torch.tensor(ids, dtype=torch.int32), post_process, **options)
            assert plain.string(ids, post_process, **options) == wanted


def test_every_post_processor_of_ours_is_fairseqs() -> None:
    for name, process in fairseq_lines.POST_PROCESSORS.items():
        for text in ("", "a@@ b", "\u2581a b \u2581c", "a b @@", " x"):
            assert process(text) == data_utils.post_process(text, name)


def test_a_dictionary_with_strings_of_its_own_is_used_itself() -> None:
    class Own(Dictionary):
        def string(self, *_: Any, **__: Any) -> str:
            return "own"

    assert isinstance(fairseq_run.plain_dictionary(Own(), None), Own)
    assert isinstance(fairseq_run.plain_dictionary(Dictionary(), "letter"), Dictionary)


# Bad input.


def _sentences(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What standard error says, without fairseq's log lines."""
    return [line for line in capsys.readouterr().err.splitlines() if " | INFO | " not in line]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{data}"], "--path is needed"),
        (["{data}", "--path", "{tmp}/none.pt"], "There is no checkpoint file {tmp}/none.pt."),
        (["{data}", "--path", "{tmp}/not.pt"], "Cannot load the checkpoint {tmp}/not.pt: "),
        (["{tmp}/no-data", "--path", "{model}"], "There is no data folder {tmp}/no-data."),
        (["{data}", "--path", "{model}", "--gen-subset", "none"], "Cannot load the subset none of {data}: "),
        (["{data}", "--path", "{model}", "--beams", "4"], "--beams"),
        (["{data}", "--path", "{model}", "--beam", "four"], "four"),
        (["{data}", "--path", "{model}", "--sampling", "--beam", "2"], "--sampling needs --nbest"),
        (["{data}", "--path", "{model}", "--replace-unk"], "--dataset-impl raw"),
        (["{data}", "--path", "{model}", "--resume"], "--resume needs --results-path"),
        (["{data}", "--path", "{model}", "--max-tokens", "auto", "--batch-size", "auto"], "Only one"),
        (["{data}", "--path", "{model}", "--model-overrides", "x="], "--model-overrides"),
        (["{data}", "--path", "{model}", "--max-source-positions", "4"], "Size of sample"),
        (["{data}", "--path", "{model}", "--results-path", "{tmp}/not.pt/x"], "Cannot write"),
    ],
)
def test_bad_arguments_are_one_sentence(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "not.pt").write_text("this is no checkpoint\n")
    names = {"data": data, "model": model, "tmp": tmp_path}
    code = generate.main([*(flag.format(**names) for flag in flags), "--cpu", "--no-progress-bar", "--workers", "0"])
    assert code == 1
    (error,) = _sentences(capsys)
    assert message.format(**names) in error


def test_an_undecodable_dictionary_is_named(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data-bin"
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "dict.de.txt").write_bytes(b"w1 5\nw\xff2 4\n")
    assert generate.main([str(folder), "--path", str(model), "--cpu"]) == 1
    (error,) = _sentences(capsys)
    assert "dict.de.txt" in error


def test_a_full_disk_is_one_sentence(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "generate-test.txt").symlink_to("/dev/full")
    assert generate.main([*job, "--results-path", str(tmp_path), "--workers", "0"]) == 1
    (error,) = _sentences(capsys)
    assert "No space left on device" in error


def test_ctrl_c_keeps_what_is_done_and_exits_130(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*job, "--beam", "2", "--results-path", str(tmp_path), "--workers", "0"]
    whole = fairseq_kit.run_fastgen(*job, "--beam", "2", "--workers", "0")
    with monkeypatch.context() as patch:
        patch.setattr(fairseq_run.Generation, "_infer", _failing_at(4, KeyboardInterrupt()))
        assert generate.main(flags) == 130
    results = tmp_path / "generate-test.txt"
    kept = fairseq_kit._result_lines(results.read_text("utf-8"))
    assert 0 < len(kept) < len(whole) and kept == whole[: len(kept)]
    assert generate.main([*flags, "--resume"]) == 0
    assert fairseq_kit._result_lines(results.read_text("utf-8")) == whole


def test_a_real_ctrl_c_exits_130(job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2", "--results-path", str(tmp_path), "--workers", "1"]
    real = fairseq_run.Generation._infer
    monkeypatch.setattr(
        fairseq_run.Generation, "_infer", lambda self, sample: (time.sleep(kill_kit.PAUSE), real(self, sample))[1]
    )
    results = tmp_path / "generate-test.txt"
    assert kill_kit.interrupt(lambda: generate.main(flags), journal_path(results)) == 130
    whole = fairseq_kit.run_fastgen(*flags[:-4], "--workers", "0")
    kept = fairseq_kit._result_lines(results.read_text("utf-8"))
    assert 0 < len(kept) < len(whole) and kept == whole[: len(kept)]


def _failing_at(call: int, error: BaseException) -> Callable[..., Any]:
    real, calls = fairseq_run.Generation._infer, []

    def infer(self: Any, sample: Any) -> Any:
        calls.append(sample["id"].tolist())
        if len(calls) == call:
            raise error
        return real(self, sample)

    infer.calls = calls  # type: ignore[attr-defined]
    return infer


# Memory.


@pytest.mark.parametrize(
    "size", [["--batch-size", "auto"], ["--max-tokens", "auto"], ["--max-tokens", "60"]], ids=" ".join
)
def test_out_of_memory_in_the_third_batch_loses_and_repeats_nothing(
    job: list[str], monkeypatch: pytest.MonkeyPatch, size: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stock = fairseq_kit.run_stock(*job, "--beam", "2")
    monkeypatch.setattr(fairseq_run, "AUTO_SENTENCES", 2)
    monkeypatch.setattr(fairseq_run, "AUTO_TOKENS", 40)
    infer = _failing_at(3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    monkeypatch.setattr(fairseq_run.Generation, "_infer", infer)
    flags = [flag for flag in job if flag not in ("--max-tokens", "60")]
    ours = fairseq_kit.run_fastgen(*flags, *size, "--beam", "2", "--workers", "0")
    if "auto" in size:  # inside a batch fairseq sorts by length: other batches, another order
        stock, ours = fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)
    assert fairseq_kit.differences(stock, ours) == []
    sizes = [len(ids) for ids in infer.calls]  # type: ignore[attr-defined]
    assert sizes[3] == sizes[2] // 2
    assert sum(sizes) - sizes[2] == SENTENCES
    assert "out of memory" in capsys.readouterr().err
    if "auto" in size:
        assert sizes[1] > sizes[0] and max(sizes[3:]) <= sizes[2] // 2 + 1


# Resume.


@pytest.mark.parametrize(
    "flags",
    [["--beam", "3", "--remove-bpe"], ["--sampling", "--sampling-topk", "10", "--seed", "3", "--beam=2", "--nbest=2"]],
    ids=["beams", "sampling"],
)  # fmt: skip
def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    job: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    common = [*job, *flags, "--batch-size", "2", "--workers", "0"]
    whole = fairseq_kit.run_fastgen(*common)
    results = tmp_path / "generate-test.txt"
    resumed = [*common, "--results-path", str(tmp_path), "--resume"]
    real = fairseq_run.Generation._infer
    with monkeypatch.context() as patch:
        patch.setattr(
            fairseq_run.Generation, "_infer", lambda self, sample: (time.sleep(kill_kit.PAUSE), real(self, sample))[1]
        )
        kills = kill_kit.kill_at_random(lambda: generate.main(resumed), journal_path(results), kills=10, seed=9)
    assert kills >= 5
    assert generate.main(resumed) == 0
    text = results.read_text("utf-8")
    assert fairseq_kit._result_lines(text) == whole  # scores too: the same batches
    assert f"Translated {SENTENCES} sentences" in text + capsys.readouterr().err
    assert not journal_path(results).exists()


def test_resume_of_a_complete_run_does_nothing(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    assert generate.main(flags) == 0
    before = (tmp_path / "generate-test.txt").read_bytes()
    assert generate.main([*flags, "--resume"]) == 0
    assert (tmp_path / "generate-test.txt").read_bytes() == before
    assert "nothing to resume" in capsys.readouterr().err


def test_resume_with_other_flags_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(fairseq_run.Generation, "_infer", _failing_at(2, KeyboardInterrupt()))
        assert generate.main(flags) == 130
    assert generate.main([*flags, "--resume", "--beam", "2"]) == 1
    assert "another generation.beam" in capsys.readouterr().err


# Workers.


def test_a_worker_killed_in_mid_run_loses_and_repeats_nothing(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2"]
    whole = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    pools: list[WorkerPool] = []
    real = fairseq_run.Generation._infer

    class Watched(WorkerPool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(self)

    calls = []

    def infer(self: Any, sample: Any) -> Any:
        calls.append(sample)
        if len(calls) in (4, 9):
            os.kill(pools[0].pids[len(calls) % 2], signal.SIGKILL)
        return real(self, sample)

    monkeypatch.setattr(generate, "WorkerPool", Watched)
    monkeypatch.setattr(fairseq_run.Generation, "_infer", infer)
    assert fairseq_kit.run_fastgen(*flags, "--workers", "2") == whole
    assert pools[0].restarts >= 1


def test_workers_need_no_fairseq_to_make_lines() -> None:
    """What a worker imports decides how soon it is there."""
    code = "import sys, fastgen.cli.generate, fastgen.cli.fairseq_lines; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=fairseq_kit.environment(), capture_output=True, text=True, check=True
    )
    assert not {"torch", "fairseq", "transformers", "numpy"} & set(run.stdout.split())


def test_a_codec_that_cannot_be_pickled_runs_in_the_parent() -> None:
    plain = fairseq_lines.Symbols([], 0, 2, 3, "<unk>")
    form = fairseq_lines.Format(
        plain, plain, 1, "<unk>", None, frozenset({2}), io.BytesIO(), None, None, False, None, False, False
    )
    assert fairseq_run.can_travel(form)
    form = fairseq_lines.Format(
        plain, plain, 1, "<unk>", None, frozenset({2}), lambda x: x, None, None, False, None, False, False
    )
    assert not fairseq_run.can_travel(form)
