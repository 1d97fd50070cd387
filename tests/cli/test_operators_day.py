"""A day of somebody who runs the command for the first time: what goes wrong, and what is said and kept.

Each command is a process of its own, as in a shell, and one follows the other in the same folder. The service's day,
with half-open connections and a stop under load, is tests/serving/test_serve.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the command needs transformers")

from transformers_kit import MODEL, stock

from fastgen.pipeline.resume import journal_path

if sys.platform != "win32":
    import resource

pytestmark = pytest.mark.slow
NAME = "fastgen-generate-transformers"
FLAGS = ["--num-beams", "3", "--max-new-tokens", "24", "--workers", "0", "--batch-size", "5", "--quiet"]
_SLOWLY = """
import sys, time
from fastgen.cli import generate_transformers
from fastgen.pipeline.transformers.generation import Generator
run = Generator._run
Generator._run = lambda self, records: (time.sleep(0.3), run(self, records))[1]
sys.exit(generate_transformers.main())
"""


class Day:
    """A folder, and the commands that are typed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: object, slowly: bool = False, limit: int | None = None) -> subprocess.Popen[str]:
        """`limit`: the most bytes of a file, as a full disk has it."""

        def limited() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # else what a script starts is deaf to it
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        code = ["-c", _SLOWLY] if slowly else ["-m", "fastgen.cli.generate_transformers"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *code, *map(str, words), *FLAGS],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=limited,
        )

    def types(self, *words: object, code: int, limit: int | None = None) -> str:
        """What the command says; its exit code is `code`."""
        process = self.start(*words, limit=limit)
        _, said = process.communicate(timeout=300)
        assert process.returncode == code, said
        assert all(line.startswith(f"{NAME}: ") and line.endswith(".") for line in said.splitlines()), said
        return said.replace(f"{NAME}: ", "")

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text("utf-8").splitlines()


def _wait(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")
def test_a_day(tmp_path: Path, texts: list[str]) -> None:
    day, wanted = Day(tmp_path), stock(texts)[0]
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"{text}\n" for text in texts), "utf-8")

    # Wrong paths, and a model without a tokenizer.
    assert day.types("./modle", "in.txt", "out.txt", code=1) == (
        "MODEL ./modle: the path does not exist; give a folder, or the name of a model on the hub.\n"
    )
    assert day.types(MODEL, "input.txt", "out.txt", code=1) == "Cannot read input.txt: No such file or directory.\n"
    assert "No such file or directory" in day.types(MODEL, "in.txt", "no/out.txt", code=1)
    shutil.copytree(MODEL, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "bare has no tokenizer" in day.types("bare", "in.txt", "out.txt", code=1)
    assert "--num-beam" in day.types(MODEL, "in.txt", "out.txt", "--num-beam", "3", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "in.txt"]

    # Blank lines, and a line that can't be used.
    (tmp_path / "blank.txt").write_text(f"{texts[0]}\n\n{texts[1]}\n", "utf-8")
    assert day.types(MODEL, "blank.txt", "blank.out", code=0) == ""
    assert day.lines("blank.out") == [wanted[0], "", wanted[1]]
    (tmp_path / "bad.txt").write_bytes(source.read_bytes() + b"\xff\n")
    assert day.types(MODEL, "bad.txt", "bad.out", code=1) == (
        f"bad.txt, line {len(texts) + 1}: not UTF-8 (byte 0xff at position 1); --on-error blank or skip goes on.\n"
    )
    assert f"1 of {len(texts) + 1} records failed." in day.types(
        MODEL, "bad.txt", "bad.out", "--on-error", "blank", code=1
    )
    assert day.lines("bad.out") == [*wanted, ""]

    # Ctrl-C, and then the disk is full.
    process = day.start(MODEL, "in.txt", "out.txt", slowly=True)
    _wait(lambda: output.exists() and output.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=240)[1] == f"{NAME}: interrupted; what was finished is kept.\n"
    assert process.returncode == 130
    kept = day.lines("out.txt")
    assert kept == wanted[: len(kept)] and len(kept) < len(wanted)

    # The forgotten flag.
    said = day.types(MODEL, "in.txt", "out.txt", code=1)
    assert said == "out.txt holds what an earlier run wrote: --resume goes on with it, --overwrite replaces it.\n"
    assert day.lines("out.txt") == kept
    said = day.types(MODEL, "in.txt", "out.txt", "--resume", code=1, limit=output.stat().st_size + 40)
    assert "Cannot write out.txt" in said and "what was finished before is kept." in said
    assert day.types(MODEL, "in.txt", "out.txt", "--resume", code=0) == ""
    assert day.lines("out.txt") == wanted
    assert day.types(MODEL, "in.txt", "out.txt", "--resume", code=0) == "out.txt is complete: nothing to resume.\n"

    # A file that somebody else put there, and one that is in the way.
    (tmp_path / "precious").write_text("mine")
    journal_path(tmp_path / "new.txt").symlink_to(tmp_path / "precious")
    assert "new.txt.journal, beside new.txt: it is a symbolic link: remove it" in day.types(
        MODEL, "in.txt", "new.txt", code=1
    )
    assert "--overwrite replaces it" in day.types(MODEL, "in.txt", "precious", code=1)
    assert (tmp_path / "precious").read_text() == "mine"
    assert day.types(MODEL, "in.txt", "precious", "--overwrite", code=0) == ""
    assert day.lines("precious") == wanted
