"""`--ray`: what the command writes without it, from several actors; whoever is killed, nothing is lost or twice."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")

import pyarrow.parquet

from fastgen.cli import generate_transformers
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.distributed import run as driver
from fastgen.pipeline.transformers import batches
from fastgen.pipeline.transformers.settings import RunSettings

pytestmark = pytest.mark.slow
MODEL = str(SHIPPED_MODEL)
FLAGS = ["--num-beams", "3", "--batch-size", "8", "--quiet"]
RAY = ["--ray", "--actors", "2", "--cpus-per-actor", "1"]
WINDOW = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "WINDOW", WINDOW)
    monkeypatch.setattr(batches, "WINDOW", WINDOW)  # of the command without Ray


def run(*arguments: object) -> int:
    return generate_transformers.main([str(argument) for argument in arguments])


def plain(source: Path, *flags: object) -> bytes:
    """What the command writes without Ray."""
    output = source.with_name(f"plain-{random.random()}.jsonl")
    run(MODEL, source, output, *FLAGS, *flags, "--workers", 0)
    return output.read_bytes()


@pytest.mark.parametrize(
    "flags", ((), ("--num-return-sequences", 2), ("--do-sample", "--num-beams", 1, "--top-k", 20)), ids=str
)
def test_the_file_is_that_of_one_process(cluster: Any, lines: Path, tmp_path: Path, flags: tuple[Any, ...]) -> None:
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, *flags, *RAY) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == plain(lines, *flags)
    assert not (tmp_path / "out.jsonl.parts").exists()
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, *flags, *RAY, "--resume") == 0  # is complete


def test_parts_written_by_fsspec_are_those_written_by_pyarrow(cluster: Any, lines: Path, tmp_path: Path) -> None:
    """`local://` is fsspec's name for files of this machine, and none of pyarrow's: all nodes go through fsspec."""
    flags = [*FLAGS, *RAY, "--shards"]
    for source, output in ((lines, tmp_path / "a"), (f"local://{lines}", f"local://{tmp_path}/b")):
        assert run(MODEL, source, output, *flags) == 0
    here, there = (sorted((tmp_path / name).glob("part-*")) for name in "ab")
    assert [path.name for path in here] == [path.name for path in there] and len(here) == 7
    assert b"".join(path.read_bytes() for path in there) == plain(lines)
    there[3].unlink()
    assert run(MODEL, f"local://{lines}", f"local://{tmp_path}/b", *flags, "--resume") == 0
    assert [path.read_bytes() for path in there] == [path.read_bytes() for path in here]


def test_records_that_fail_are_those_of_one_process(cluster: Any, lines: Path, tmp_path: Path) -> None:
    lines.write_text(lines.read_text() + "\n" + "5 " * 400 + "\n")
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, *RAY) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == plain(lines)


@pytest.mark.parametrize(("line", "why"), [(b"\xff", "not UTF-8"), (b"5 " * 400, "401 tokens")], ids=["bytes", "long"])
def test_text_ends_at_a_record_that_fails_and_goes_on_once_it_is_mended(
    cluster: Any, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    text, output, parts = lines.read_bytes(), tmp_path / "out.txt", tmp_path / "out.txt.parts"
    lines.write_bytes(text + line + b"\n")
    assert run(MODEL, lines, output, *FLAGS, *RAY) == 1
    assert f"in.txt, line 201: {why}" in capfd.readouterr().err
    assert not output.exists()
    # Of what is found before a model is loaded nothing is left.
    assert parts.exists() is (why != "not UTF-8") and (not parts.exists() or parts.stat().st_mode & 0o777 == 0o700)
    kept = {path: path.stat().st_mtime_ns for path in (parts / "_done").glob("*.json")}
    lines.write_bytes(text + b"\n1 2\n")  # a blank line is ordinary
    if parts.exists():
        assert run(MODEL, lines, output, *FLAGS, *RAY) == 1
        assert "--resume goes on with them, --overwrite replaces them" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (parts / "_done").glob("*.json")} == kept
    assert run(MODEL, lines, output, *FLAGS, *RAY, "--resume") == 0
    wanted = [json.loads(line)["outputs"][0]["text"] for line in plain(lines).splitlines()]
    assert output.read_text("utf-8").splitlines() == wanted and wanted[200] == ""
    lines.write_bytes(text)
    assert run(MODEL, lines, output, *FLAGS, *RAY, "--resume") == 1
    assert "it is complete, and the input has changed since; --overwrite starts again." in capfd.readouterr().err
    assert run(MODEL, lines, output, *FLAGS, *RAY, "--overwrite") == 0
    assert output.read_text("utf-8").splitlines() == wanted[:200]


@pytest.mark.parametrize("kind", ["is a symbolic link", "belongs to another user", "others may write"])
def test_parts_are_written_to_no_other_folder(
    cluster: Any, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    there, parts = tmp_path / "elsewhere", tmp_path / "out.txt.parts"
    if kind == "is a symbolic link":
        there.mkdir()
        parts.symlink_to(there)
    else:
        there = parts
        parts.mkdir()
        if kind == "others may write":
            parts.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(parts, 12345, 12345)
        else:
            pytest.skip("only root can make a folder of another user")
    assert run(MODEL, lines, tmp_path / "out.txt", *FLAGS, *RAY) == 1
    assert kind in capfd.readouterr().err
    assert list(there.iterdir()) == []


def test_an_earlier_runs_parts_are_replaced_only_by_a_run_that_can_begin(
    cluster: Any, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shards = ("--shards", "--output-format", "text")
    assert run(MODEL, lines, tmp_path / "out", *FLAGS, *RAY, *shards) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(before) > 2
    lines.write_bytes(lines.read_bytes() + b"\xff\n")
    assert run(MODEL, lines, tmp_path / "out", *FLAGS, *RAY, *shards, "--overwrite") == 1
    assert "not UTF-8" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_an_output_in_the_folder_of_the_input_is_no_input(tmp_path: Path) -> None:
    """Nor what lies beside it: a run that was killed could not be gone on with."""
    for name in ("a.txt", "out.txt", "out.txt.journal", "out.txt.journal.new", "out.txt.more"):
        (tmp_path / name).write_text("1\n")
    settings = RunSettings(model=MODEL, input=str(tmp_path), output=str(tmp_path / "out.txt"))
    assert [Path(file.path).name for file in driver._files(settings)] == ["a.txt", "out.txt.more"]
    alone = dataclasses.replace(settings, input=str(tmp_path / "out.txt"))
    assert [Path(file.path).name for file in driver._files(alone)] == ["out.txt"], "is refused by name"


def test_a_folder_becomes_shards_of_parquet(cluster: Any, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    all_lines = lines.read_text().splitlines(keepends=True)
    (tmp_path / "in" / "a.txt").write_text("".join(all_lines[:150]))
    (tmp_path / "in" / "b.jsonl").write_text(
        "".join(json.dumps({"id": f"n{i}", "text": line.strip()}) + "\n" for i, line in enumerate(all_lines[150:]))
    )
    shards = ("--shards", "--output-format", "parquet")
    assert run(MODEL, tmp_path / "in", tmp_path / "out", *FLAGS, *RAY, *shards) == 0
    rows = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    expected = [json.loads(line) for line in plain(lines).splitlines()]
    assert [row["outputs"][0]["text"] for row in rows] == [one["outputs"][0]["text"] for one in expected]
    assert [(row["file"], row["line"]) for row in rows[149:151]] == [("a.txt", 150), ("b.jsonl", 1)]
    assert [row["id"] for row in rows] == [None] * 150 + [f"n{i}" for i in range(50)]
    assert run(MODEL, tmp_path / "in", tmp_path / "all.parquet", *FLAGS, *RAY) == 0
    assert pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pylist() == rows


def test_rows_of_a_dataset(cluster: Any, lines: Path) -> None:
    import ray

    from fastgen.distributed import generate

    texts = lines.read_text().split()
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    try:
        dataset = ray.data.from_items([{"n": i, "text": text} for i, text in enumerate([*texts, " ", None])])
        rows = generate(dataset, MODEL, actors=1, cpus_per_actor=1, num_beams=3, batch_size=8).take_all()
        with pytest.raises(TypeError, match="no option 'beams'"):
            generate(dataset, MODEL, beams=3)
    finally:
        ray.shutdown()
    expected = [json.loads(line)["outputs"] for line in plain(lines).splitlines()]
    rows.sort(key=lambda row: row["n"])
    assert [[one["text"] for one in row["outputs"]] for row in rows[:-2]] == [
        [one["text"] for one in outputs] for outputs in expected
    ]
    assert rows[-2]["outputs"] == [{"text": "", "score": None}] and rows[-2]["error"] is None
    assert rows[-1]["outputs"] is None and "no text in the column 'text'" in rows[-1]["error"]


@pytest.mark.parametrize(
    "flags, what",
    (
        (["--actors", "0"], "--actors 0"),
        (["--shards", "--references", "x"], "--references needs one output file"),
        (["--input-format", "parquet"], "Cannot read"),
        (["--resume", "--overwrite"], "--resume goes on with an earlier run, --overwrite replaces it"),
        (["--resume", "--overwrite", "--shards"], "--resume goes on with an earlier run, --overwrite replaces it"),
        (["--no-such-flag"], "Unrecognized arguments"),
        (["--ray", "127.0.0.1:1"], "the Ray cluster at 127.0.0.1:1"),
    ),
)
def test_bad_arguments_are_a_sentence(
    cluster: Any, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], what: str
) -> None:
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, "--ray", *flags) == 1
    assert what in capfd.readouterr().err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("flag", (["--actors", "2"], ["--shards"], ["--gpus-per-actor", "1"]))
def test_what_needs_ray_says_so(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, *flag) == 1
    assert f"{flag[0]} needs --ray." in capsys.readouterr().err
    assert run(MODEL, lines, tmp_path / "out.parquet", *FLAGS) == 1
    assert "--ray" in capsys.readouterr().err


def _marks(parts: Path) -> int:
    return len(list((parts / "_done").glob("*.json"))) if parts.exists() else 0


def _waits(what: Callable[[], bool], seconds: float = 240) -> Iterator[None]:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
        yield


# With blocks that take their time, so that something is left to do when something is killed.
_SCRIPT = f"""
import sys, time
from fastgen.cli import generate_transformers
from fastgen.distributed import run
from fastgen.distributed.worker import BlockWorker
class Slow(BlockWorker):
    def generate(self, block):
        time.sleep(1)
        return super().generate(block)
run.WINDOW = {WINDOW}
run.BlockWorker = Slow
sys.exit(generate_transformers.main(sys.argv[1:]))
"""


def _start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _SCRIPT, *map(str, arguments)])


def test_a_driver_that_is_killed_is_resumed(cluster: Any, lines: Path, tmp_path: Path) -> None:
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    arguments = (MODEL, lines, output, *FLAGS, *RAY)
    for done in (1, 3):
        process = _start(*arguments, "--resume")
        for _ in _waits(lambda done=done: _marks(parts) >= done):  # type: ignore[misc]
            assert process.poll() is None
        process.kill()
        process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (parts / "_done").glob("*.json")}
    assert 3 <= len(kept) <= 7
    assert run(*arguments) == 1  # not without --resume
    process = _start(*arguments, "--resume")
    for _ in _waits(lambda: _marks(parts) > len(kept) or process.poll() is not None):
        pass
    if parts.exists():
        assert all(path.stat().st_mtime_ns == before for path, before in kept.items() if path.exists())
    assert process.wait(timeout=240) == 0
    assert output.read_bytes() == plain(lines) and not parts.exists()


def test_an_interrupted_driver_keeps_what_is_done(cluster: Any, lines: Path, tmp_path: Path) -> None:
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    process = _start(MODEL, lines, output, *FLAGS, *RAY)
    for _ in _waits(lambda: _marks(parts) >= 1):
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=180) == 130 and _marks(parts) >= 1
    assert run(MODEL, lines, output, *FLAGS, *RAY, "--resume") == 0 and output.read_bytes() == plain(lines)


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_is_killed_costs_only_its_blocks(cluster: Any, lines: Path, tmp_path: Path, seed: int) -> None:
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    done = random.Random(seed).randrange(4)
    process = _start(MODEL, lines, output, *FLAGS, "--ray", "--actors", "2", "--cpus-per-actor", "1")
    for _ in _waits(lambda: _marks(parts) >= done and parts.exists()):
        assert process.poll() is None
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    try:
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
    assert output.read_bytes() == plain(lines)


def test_a_block_that_kills_its_worker_is_named(
    cluster: Any, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastgen.distributed import worker

    class Dies(worker.BlockWorker):
        def generate(self, block: Any) -> Any:
            if block.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().generate(block)

    monkeypatch.setattr(driver, "BlockWorker", Dies)
    assert run(MODEL, lines, tmp_path / "out.jsonl", *FLAGS, *RAY) == 1
    told = capfd.readouterr().err
    assert "in.txt, records 65 and the 31 that follow: a worker died 4 times" in told
    assert _marks(tmp_path / "out.jsonl.parts") >= 1
