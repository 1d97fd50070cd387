"""What results say of the command and the commit that made them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fastgen.bench import provenance


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["fastgen-bench", "peers", "--output", "/home/me/out"], "fastgen-bench peers --output out"),
        (["fastgen-bench", "--output=/home/me/my out"], "fastgen-bench '--output=my out'"),
        (["benchmarks/bench_wide.py", "--beams", "8", "16"], "bench_wide.py --beams 8 16"),
        (["a"], "a"),
    ],
)
def test_a_command_without_folders(words: list[str], shown: str) -> None:
    assert provenance.command(words) == shown


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    assert provenance.commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert provenance.commit(tmp_path) is None  # there is none yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert provenance.commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert provenance.commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "inside").mkdir()
    assert provenance.commit(tmp_path / "inside") is None  # of an installed package


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    assert provenance.commit(tmp_path) is None  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit(tmp_path) is None
