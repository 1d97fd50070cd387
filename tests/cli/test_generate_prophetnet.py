"""ProphetNet's published checkpoints with `--user-dir`, as both commands read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
import prophetnet_kit as kit

import fastgen


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prophetnet")
    kit.write_job(folder)
    return [
        str(folder), "--path", str(folder / "checkpoint.pt"), "--user-dir", kit.USER_DIR,
        "--task", "translation_prophetnet", "--cpu", "--num-workers", "0", "--max-tokens", "60", "--max-len-b", "12",
        "--no-progress-bar", "--required-batch-size-multiple", "1", "--beam", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags", [[], ["--lenpen", "1.5", "--no-repeat-ngram-size", "3"], ["--print-alignment"]], ids=" ".join
)
def test_the_lines_are_stocks(job: list[str], flags: list[str]) -> None:
    with fastgen.disabled():  # n-grams are banned by fastgen alone
        stock = None if "--no-repeat-ngram-size" in flags else fairseq_kit.run_stock(*job, *flags)
    ours = fairseq_kit.run_fastgen(*job, *flags, "--workers", "0")
    assert stock is None or fairseq_kit.differences(stock, ours) == []
    assert len(ours) > 5 * 16 and sum(line.startswith("H-") for line in ours) == 16


@pytest.mark.parametrize(
    "first",
    [f"utils.import_user_module(argparse.Namespace(user_dir={kit.USER_DIR!r}))", "import fastgen.models.prophetnet"],
)
def test_the_folder_registers_once(first: str) -> None:
    script = f"""
import argparse, sys
import fastgen
assert not [name for name in sys.modules if name.startswith(("torch", "fairseq", "fastgen.models"))]
from fairseq import models, tasks, utils
assert {kit.ARCHITECTURE!r} not in models.ARCH_MODEL_REGISTRY
{first}
found = models.ARCH_MODEL_REGISTRY[{kit.ARCHITECTURE!r}], tasks.TASK_REGISTRY["translation_prophetnet"]
import fastgen.models.prophetnet
utils.import_user_module(argparse.Namespace(user_dir={kit.USER_DIR!r}))
assert found == (models.ARCH_MODEL_REGISTRY[{kit.ARCHITECTURE!r}], tasks.TASK_REGISTRY["translation_prophetnet"])
assert found[0].__module__ == "fastgen.models.prophetnet.model"
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=fairseq_kit.environment(), cwd=Path.home())
