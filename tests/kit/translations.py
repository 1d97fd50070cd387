"""Sentences for the trained translation model, as token ids of its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def encoder(shared: Path) -> Callable[[str], list[int]]:
    """From a line to the translation model's token ids."""
    spm = pytest.importorskip("sentencepiece", reason="the data is tokenised with sentencepiece")
    processor = spm.SentencePieceProcessor(model_file=str(shared / "data" / "ddtp-en-de" / "spm.model"))
    tokens = json.loads((shared / "models" / "ddtp-en-de" / "vocab.json").read_text(encoding="utf-8"))
    ids = {token: index for index, token in enumerate(tokens)}
    unknown, end = ids["<unk>"], ids["</s>"]
    return lambda line: [*(ids.get(piece, unknown) for piece in processor.encode(line, out_type=str)), end]


def sentences(shared: Path) -> list[list[int]]:
    """The 1,000 test sentences, in the order of the file."""
    lines = (shared / "data" / "ddtp-en-de" / "test.en").read_text(encoding="utf-8").splitlines()
    return [*map(encoder(shared), lines)]
