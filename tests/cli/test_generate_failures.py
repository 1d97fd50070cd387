"""fastgen-generate when something goes wrong: bad input, signals, kills, memory, full disks; and going on after it."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
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
from fairseq.data import LanguagePairDataset
from fairseq_kit import SENTENCES

import fastgen
from fastgen.cli import generate
from fastgen.pipeline import WorkerPool, batching
from fastgen.pipeline.fairseq import batches, lines, run
from fastgen.pipeline.fairseq.generation import Generation
from fastgen.pipeline.resume import journal_path

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
        (["{data}", "--path", "{model}", "--results-path", "s3://a/b"], "s3://a/b is no folder of this machine"),
        (["{data}", "--path", "{model}", "--max-tokens", "auto", "--batch-size", "auto"], "Only one"),
        (["{data}", "--path", "{model}", "--model-overrides", "x="], "--model-overrides"),
        (["{data}", "--path", "{model}", "--max-source-positions", "4"], "Size of sample"),
        (["{data}", "--path", "{model}", "--results-path", "{tmp}/not.pt/x"], "Cannot write"),
        (
            ["{data}", "--path", "{model}", "--batch-size", "auto", "--constraints"],
            "--constraints needs constraints in the data",
        ),
        (["{data}", "--path", "{model}", "--beam", "0"], "--beam must be at least 1"),
        (["{data}", "--path", "{model}", "--batch-size", "x"], "'x' is neither a whole number nor 'auto'"),
        (["{data}", "--path", "{model}", "--temperature", "0"], "--temperature must be above 0"),
        (["{data}", "--path", "{model}", "--sampling-topk", "3"], "--sampling-topk needs --sampling"),
        (["{data}", "--path", "{model}", "--diverse-beam-groups", "2"], "a --beam that it divides, not 5"),
        (["{data}", "--path", "{model}", "--match-source-len", "--diverse-beam-groups", "5"], "fairseq refuses"),
        (["{data}", "--path", "{model}", "--seed", "-1"], "--seed must be from 0"),
        (["{data}", "--path", "{model}", "--num-workers", "-2"], "--num-workers must be 0 or more"),
        (["{data}", "--path", "{model}", "--distributed-rank", "7"], "--distributed-rank 7 must be"),
        (["{data}", "--path", "{model}", "--distributed-rank", "-1"], "--distributed-rank -1 must be"),
        (["{data}", "--path", "{model}", "--user-dir", "{tmp}/no-folder"], "Cannot import --user-dir {tmp}/no-folder"),
        (["{data}", "--path", "{model}", "--user-dir"], "--user-dir: expected one argument"),
        (["{data}", "--path", "{model}", "--replace-unk", "{tmp}/no-file", "--dataset-impl", "raw"], "{tmp}/no-file"),
        (["{data}", "--path", "{model}", "--lm-path", "{model}"], "is no language model"),
        (["{data}", "--path", "{model}", "--remove-bpe=##"], "'##'"),
        (["{few}", "--path", "{model}"], "leaves out every sentence (3)"),
        (["{empty}", "--path", "{model}"], "Cannot load the subset test of {empty}"),
        (["{raw}", "--path", "{model}", "--dataset-impl", "raw"], "the subset test of {raw} is empty"),
        (["{sources}", "--path", "{model}", "--prefix-size", "2"], "--prefix-size needs targets"),
        (["{sources}", "--path", "{model}", "--score-reference"], "--score-reference needs targets"),
    ],
)
def test_bad_arguments_are_one_sentence(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "not.pt").write_text("this is no checkpoint\n")
    names = {"data": data, "model": model, "tmp": tmp_path, **_other_data(tmp_path)}
    code = generate.main([*(flag.format(**names) for flag in flags), "--cpu", "--no-progress-bar", "--workers", "0"])
    assert code == 1
    (error,) = _sentences(capsys)
    assert message.format(**names) in error


def _other_data(folder: Path) -> dict[str, Path]:
    few = fairseq_kit.write_data(folder / "few", 3)
    empty = fairseq_kit.write_data(folder / "empty", 0)
    sources = fairseq_kit.write_data(folder / "sources", 8)
    raw = fairseq_kit.write_data(folder / "raw", 1)
    for suffix in ("bin", "idx"):
        (sources / f"test.en-de.de.{suffix}").unlink()
    for language in ("en", "de"):
        (raw / f"test.en-de.{language}").touch()
    return {"few": few, "empty": empty, "sources": sources, "raw": raw}


@pytest.mark.parametrize(("choice", "package"), [("wer", "editdistance"), ("bert_score", "bert_score")])
def test_a_scorer_without_its_package_is_one_sentence(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], choice: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert generate.main([*job, "--scoring", choice]) == 1
    (error,) = _sentences(capsys)
    assert "Please install" in error and choice in error


def test_a_byte_order_mark_in_raw_data_is_told(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = fairseq_kit.write_data(tmp_path / "raw", 1)
    for language in ("en", "de"):
        (raw / f"test.en-de.{language}").write_text("\ufeffw1 w2\nw4\n", "utf-8")
    flags = ["--cpu", "--no-progress-bar", "--workers", "0", "--batch-size", "auto"]
    assert generate.main([str(raw), "--path", str(model), "--dataset-impl", "raw", *flags]) == 0
    assert "byte order mark" in capsys.readouterr().err


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_keeps_what_is_done_and_exits_130(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2"]
    whole = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    flags += ["--results-path", str(tmp_path), "--workers", "1"]
    results = tmp_path / "generate-test.txt"
    with monkeypatch.context() as patch:
        _wait_at(patch, call=10)
        assert kill_kit.interrupt(lambda: generate.main(flags), journal_path(results), number) == 130
    kept = fairseq_kit.result_lines(results.read_text("utf-8"))
    assert 0 < len(kept) < len(whole) and kept == whole[: len(kept)]
    assert generate.main([*flags, "--resume"]) == 0
    assert fairseq_kit.result_lines(results.read_text("utf-8")) == whole


def _wait_at(patch: pytest.MonkeyPatch, call: int) -> None:
    """So that the run can't end before the signal comes, however late that is."""
    real, calls = Generation.infer, []

    def infer(self: Any, sample: Any) -> Any:
        calls.append(sample)
        if len(calls) == call:
            time.sleep(50)
        return real(self, sample)

    patch.setattr(Generation, "infer", infer)


def _slow_down(patch: pytest.MonkeyPatch) -> None:
    """So that there is something to interrupt."""
    real = Generation.infer
    patch.setattr(Generation, "infer", lambda self, sample: (time.sleep(kill_kit.PAUSE), real(self, sample))[1])


def _failing_at(call: int, error: BaseException) -> Callable[..., Any]:
    real = Generation.infer
    calls: list[list[int]] = []
    shapes: list[tuple[int, int]] = []

    def infer(self: Any, sample: Any) -> Any:
        calls.append(sample["id"].tolist())
        shapes.append(tuple(sample["net_input"]["src_tokens"].shape))
        if len(calls) == call:
            raise error
        return real(self, sample)

    infer.calls, infer.shapes = calls, shapes  # type: ignore[attr-defined]
    return infer


# Memory.


@pytest.mark.parametrize(
    "size", [["--batch-size", "auto"], ["--max-tokens", "auto"], ["--max-tokens", "60"]], ids=" ".join
)
def test_out_of_memory_in_the_third_batch_loses_and_repeats_nothing(
    job: list[str], monkeypatch: pytest.MonkeyPatch, size: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stock = fairseq_kit.run_stock(*job, "--beam", "2")
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 2)
    monkeypatch.setattr(batches, "AUTO_TOKENS", 40)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 0.0)  # here the clock would decide about sizes
    infer = _failing_at(3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    monkeypatch.setattr(Generation, "infer", infer)
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


@pytest.mark.parametrize("size", [["--batch-size", "auto"], ["--max-tokens", "auto"]], ids=" ".join)
def test_automatic_sizes_keep_the_sentences_that_fairseq_would_round_away(
    job: list[str], capsys: pytest.CaptureFixture[str], size: list[str]
) -> None:
    stock = fairseq_kit.run_stock(*job)
    flags = [flag for flag in job if flag not in ("--max-tokens", "60", "--required-batch-size-multiple", "1")]
    ours = fairseq_kit.run_fastgen(*flags, *size, "--workers", "0")
    assert fairseq_kit.differences(fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)) == []
    assert "leaves out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "sentences", "tokens"),
    [
        (["--max-tokens", "auto", "--batch-size", "2"], 2, 10**6),
        (["--batch-size", "auto", "--max-tokens", "30"], 10**6, 30),
    ],
    ids=["sentences", "tokens"],
)
def test_the_bound_that_is_not_automatic_holds(
    job: list[str], monkeypatch: pytest.MonkeyPatch, size: list[str], sentences: int, tokens: int
) -> None:
    stock = fairseq_kit.run_stock(*job)
    infer = _failing_at(0, RuntimeError())
    monkeypatch.setattr(Generation, "infer", infer)
    flags = [flag for flag in job if flag not in ("--max-tokens", "60")]
    ours = fairseq_kit.run_fastgen(*flags, *size, "--workers", "0")
    assert fairseq_kit.differences(fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)) == []
    assert all(count <= sentences and count * length <= tokens for count, length in infer.shapes)  # type: ignore[attr-defined]
    assert len(infer.shapes) > 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [["--batch-size", "auto"], ["--max-tokens", "60"]], ids=" ".join)
def test_halves_of_a_batch_whose_ids_are_no_positions(
    job: list[str], monkeypatch: pytest.MonkeyPatch, size: list[str]
) -> None:
    """As of a task that gives sentences ids of its own."""
    real = LanguagePairDataset.__getitem__
    monkeypatch.setattr(LanguagePairDataset, "__getitem__", lambda self, i: {**real(self, i), "id": 1000 + 7 * int(i)})
    stock = fairseq_kit.run_stock(*job, "--beam", "2")
    assert any(line.startswith("H-1007\t") for line in stock)
    monkeypatch.setattr(Generation, "infer", _failing_at(2, torch.OutOfMemoryError("CUDA out of memory.")))
    flags = [flag for flag in job if flag not in ("--max-tokens", "60")]
    ours = fairseq_kit.run_fastgen(*flags, *size, "--beam", "2", "--workers", "0")
    if "auto" in size:
        stock, ours = fairseq_kit.by_sentence(stock), fairseq_kit.by_sentence(ours)
    assert fairseq_kit.differences(stock, ours) == []


# Resume.


@pytest.mark.parametrize(
    "flags",
    [
        ["--beam", "3", "--remove-bpe", "--workers", "0"],
        ["--sampling", "--sampling-topk", "10", "--seed", "3", "--beam=2", "--nbest=2", "--workers", "0"],
        ["--beam", "3", "--remove-bpe", "--workers", "2"],
    ],
    ids=["beams", "sampling", "workers"],
)
def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    job: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    common = [*job, *flags, "--batch-size", "1"]
    whole = fairseq_kit.run_fastgen(*common)
    results = tmp_path / "generate-test.txt"
    resumed = [*common, "--results-path", str(tmp_path), "--resume"]
    with monkeypatch.context() as patch:
        _slow_down(patch)
        kills = kill_kit.kill_at_random(lambda: generate.main(resumed), journal_path(results), kills=10, seed=9)
    assert kills == 10
    assert generate.main(resumed) == 0
    text = results.read_text("utf-8")
    assert fairseq_kit.result_lines(text) == whole  # all sentences, each once; scores too: the same batches
    capsys.readouterr()
    assert generate.main(resumed) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_resume_of_a_complete_run_does_nothing(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    assert generate.main(flags) == 0
    before = (tmp_path / "generate-test.txt").read_bytes()
    assert generate.main([*flags, "--resume"]) == 0
    assert (tmp_path / "generate-test.txt").read_bytes() == before
    assert "nothing to resume" in capsys.readouterr().err


def test_results_are_not_overwritten_unless_it_is_said(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, results = [*job, "--results-path", str(tmp_path), "--workers", "0"], tmp_path / "generate-test.txt"
    assert generate.main(flags) == 0
    before = results.read_bytes(), journal_path(results).read_bytes()
    for more in ([], ["--beam", "1"]):
        assert generate.main([*flags, *more]) == 1
        assert "--resume goes on with it, --overwrite replaces it." in capsys.readouterr().err
    assert generate.main([*flags, "--resume", "--overwrite"]) == 1
    assert (results.read_bytes(), journal_path(results).read_bytes()) == before
    assert generate.main([*flags, "--beam", "1", "--overwrite"]) == 0
    assert results.read_bytes() != before[0]
    journal_path(results).unlink()
    assert generate.main(flags) == 1
    assert "no journal of a run that wrote it: --overwrite replaces it." in capsys.readouterr().err


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 3",)


def test_a_checkpoint_that_names_code_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": Malicious()}, tmp_path / "bad.pt")
    assert generate.main([*job, "--path", str(tmp_path / "bad.pt")]) == 1
    said = _sentences(capsys)[-1]
    assert (
        f"it names {os.system.__module__}.system, which could run any code here" in said and "weights_only" not in said
    )


def test_resume_with_other_flags_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "infer", _failing_at(2, KeyboardInterrupt()))
        assert generate.main(flags) == 130
    assert generate.main([*flags, "--resume", "--beam", "2"]) == 1
    assert "another generation.beam" in capsys.readouterr().err


def test_resume_of_a_shard_among_another_number_of_shards_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has other sentences: some would be lost, others would be there twice."""
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0", "--distributed-world-size"]
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "infer", _failing_at(2, KeyboardInterrupt()))
        assert generate.main([*flags, "2"]) == 130
    assert generate.main([*flags, "3", "--resume"]) == 1
    assert "another distributed_world_size; --overwrite" in capsys.readouterr().err
    assert generate.main([*flags, "2", "--resume"]) == 0
    found = fairseq_kit.result_lines((tmp_path / "generate-test.txt").read_text("utf-8"))
    assert fairseq_kit.differences(fairseq_kit.run_stock(*job, "--distributed-world-size", "2"), found) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_path_that_is_no_utf8(job: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the settings, which are logged to the results unless an import has set up logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    path = os.fsdecode(os.fsencode(tmp_path / "model") + b"\xe9.pt")
    shutil.copy(model, path)
    flags = [*job, "--path", path, "--beam", "2", "--workers", "0", "--results-path", str(tmp_path / "results")]
    assert generate.main(flags) == 0
    text = (tmp_path / "results" / "generate-test.txt").read_text("utf-8")
    assert "model\\udce9.pt" in text
    assert fairseq_kit.differences(fairseq_kit.run_stock(*job, "--beam", "2"), fairseq_kit.result_lines(text)) == []


def test_a_standard_output_without_the_results_characters(
    job: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lines.Symbols.string
    monkeypatch.setattr(lines.Symbols, "string", lambda *args, **options: "ü" + real(*args, **options))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert generate.main([*job, "--workers", "0"]) == 1
    said = _sentences(capsys)[-1]
    assert said.endswith(r"Standard output is ascii, which lacks '\xfc': set PYTHONUTF8=1, or give --results-path.")


def test_resume_of_a_complete_run_with_other_flags_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    assert generate.main([*flags, "--beam", "1"]) == 0
    before = (tmp_path / "generate-test.txt").read_bytes()
    assert generate.main([*flags, "--resume", "--beam", "3"]) == 1
    assert "another generation.beam" in capsys.readouterr().err
    assert (tmp_path / "generate-test.txt").read_bytes() == before


def test_resume_with_weights_in_8_bits_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    with fastgen.configured(weights="int8"):
        assert generate.main([*flags, "--beam", "1"]) == 0
    assert "linear layers have weights in 8 bits (FASTGEN_WEIGHTS=int8), so texts may differ" in capsys.readouterr().err
    assert generate.main([*flags, "--beam", "1", "--resume"]) == 1
    assert "another FASTGEN_WEIGHTS" in capsys.readouterr().err


def test_a_file_that_only_looks_complete_is_not(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generate-test.txt").write_text("Generate test with beam=5: BLEU4 = 1\n")
    assert generate.main([*job, "--results-path", str(tmp_path), "--resume"]) == 1
    assert "Cannot resume: there is no " in capsys.readouterr().err


def test_resume_with_another_checkpoint_or_other_data_is_refused(
    data: Path, model: Path, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, checkpoint = tmp_path / "data-bin", tmp_path / "model.pt"
    shutil.copytree(data, folder)
    shutil.copy(model, checkpoint)
    flags = [str(folder), "--path", str(checkpoint), *job[3:], "--results-path", str(tmp_path), "--workers", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "infer", _failing_at(2, KeyboardInterrupt()))
        assert generate.main(flags) == 130
    for path in (checkpoint, folder / "test.en-de.en.bin"):
        stat = path.stat()
        path.write_bytes(path.read_bytes())  # of the same length
        assert generate.main([*flags, "--resume"]) == 1
        assert f"another content of {path}; --overwrite starts again." in capsys.readouterr().err
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert generate.main([*flags, "--resume"]) == 0


def test_a_wrong_checkpoint_leaves_the_results_of_an_earlier_run(job: list[str], tmp_path: Path) -> None:
    results, wrong = tmp_path / "generate-test.txt", tmp_path / "wrong.pt"
    flags = [*job, "--results-path", str(tmp_path), "--workers", "0"]
    assert generate.main(flags) == 0
    before = results.read_bytes(), journal_path(results).read_bytes()
    wrong.write_text("this is no checkpoint\n")
    assert generate.main([*flags, "--path", str(wrong)]) == 1
    assert (results.read_bytes(), journal_path(results).read_bytes()) == before


def test_a_second_run_into_the_same_results_is_refused(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2", "--workers", "0"]
    whole = fairseq_kit.run_fastgen(*flags)
    flags += ["--results-path", str(tmp_path)]
    real, codes = Generation.infer, []

    def infer(self: Any, sample: Any) -> Any:
        if len(codes) < 2:
            codes.append(kill_kit.second_run(lambda: generate.main([*flags, *["--resume"] * len(codes)])))
        return real(self, sample)

    monkeypatch.setattr(Generation, "infer", infer)
    assert generate.main(flags) == 0
    assert codes == [1, 1]
    assert fairseq_kit.result_lines((tmp_path / "generate-test.txt").read_text("utf-8")) == whole


# Workers.


def test_a_worker_killed_in_mid_run_loses_and_repeats_nothing(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*job, "--beam", "2", "--batch-size", "2"]
    whole = fairseq_kit.run_fastgen(*flags, "--workers", "0")
    pools: list[WorkerPool] = []
    real = Generation.infer

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

    monkeypatch.setattr(run, "WorkerPool", Watched)
    monkeypatch.setattr(Generation, "infer", infer)
    assert fairseq_kit.run_fastgen(*flags, "--workers", "2") == whole
    assert pools[0].restarts >= 1
