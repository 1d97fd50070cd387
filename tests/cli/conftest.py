"""One thread per test process, a tiny fairseq model with data, and inputs for the shipped model of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the commands need torch")


import torch

from fastgen.demo import task

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fairseq data-bin of random sentences."""
    import fairseq_kit

    return fairseq_kit.write_data(tmp_path_factory.mktemp("fairseq") / "data-bin", fairseq_kit.SENTENCES)


@pytest.fixture(scope="session")
def model(data: Path) -> Path:
    """A fairseq checkpoint of a random model."""
    import fairseq_kit

    return fairseq_kit.write_checkpoint(data.parent / "model.pt", data)


@pytest.fixture(scope="session")
def job(data: Path, model: Path) -> list[str]:
    """What both commands are given in most tests."""
    return [str(data), "--path", str(model), "--cpu", "--num-workers", "0", "--max-tokens", "60", "--max-len-b", "12",
            "--no-progress-bar", "--required-batch-size-multiple", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Inputs of many lengths for the shipped model."""
    pairs = [next(task.sentences(seed, held_out=True)) for seed in range(23)]
    return [" ".join(source.split()[: 3 + 2 * i % 11]) for i, (source, _) in enumerate(pairs)]


@pytest.fixture
def source(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path
