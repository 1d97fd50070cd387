"""A trained model on real sentences: every hypothesis is stock's, and transformers finds the same translations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import judge
import pytest
import torch
import translations
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

import fastgen

SENTENCES, BATCH, BEAMS, LONGEST = 200, 50, 5, 100


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    folder = shared / "models" / "ddtp-en-de"
    if not (folder / "checkpoint.pt").is_file():
        pytest.skip(f"there is no {folder / 'checkpoint.pt'}")
    return folder


@pytest.fixture(scope="module")
def translator(folder: Path, shared: Path) -> tuple[Any, Dictionary]:
    data = shared / "data" / "ddtp-en-de" / "data-bin"
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint.pt")], arg_overrides={"data": str(data)}
    )
    assert isinstance(task, tasks.FairseqTask)
    return models[0].eval(), task.target_dictionary


@pytest.fixture(scope="module")
def sentences(folder: Path, shared: Path) -> list[list[int]]:
    """The first test sentences, sorted by length."""
    return sorted(translations.sentences(shared)[:SENTENCES], key=len)


def padded(rows: list[list[int]], pad: int, left: bool = True) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    return torch.tensor([f + row if left else row + f for row, f in zip(rows, fill, strict=True)])


def translate(translator: tuple[Any, Dictionary], rows: list[list[int]], **options: Any) -> judge.Hypotheses:
    model, words = translator
    tokens = padded(rows, words.pad())
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(words.pad()).sum(1)}}
    generator = SequenceGenerator([model], words, **{"beam_size": BEAMS, "max_len_b": LONGEST, **options})
    return generator.generate([model], sample)


def test_translations(translator: Any, sentences: list[list[int]]) -> None:
    total = 0
    for start in range(0, len(sentences), BATCH):
        rows = sentences[start : start + BATCH]
        expected = judge.compare(lambda rows=rows: translate(translator, rows))
        total += sum(map(len, expected))
    assert total == SENTENCES * BEAMS


def test_other_searches(translator: Any, sentences: list[list[int]]) -> None:
    rows = sentences[60:90]
    for options in (dict(beam_size=1), dict(beam_size=8, len_penalty=0.6), dict(min_len=20, unk_penalty=5.0)):
        judge.compare(lambda options=options: translate(translator, rows, **options))


def test_hub_models(folder: Path, shared: Path, sentences: list[list[int]]) -> None:
    """The way of `torch.hub`: load from a folder, generate with several beams in turn."""
    data = shared / "data" / "ddtp-en-de" / "data-bin"
    hub = TransformerModel.from_pretrained(str(folder), "checkpoint.pt", data_name_or_path=str(data))
    tokens = [torch.tensor(row) for row in sentences[100:108]]
    for beams in (5, 2):
        expected = judge.compare(lambda beams=beams: hub.generate(tokens, beam=beams, max_len_b=60))
        assert [len(hypotheses) for hypotheses in expected] == [beams] * 8
    text = hub.string(tokens[0])
    with fastgen.disabled():
        expected_text = hub.translate(text)
    assert hub.translate(text) == expected_text and fastgen.report.calls()[-1].tier == "compat"


def test_the_same_weights_in_transformers(translator: Any, folder: Path, sentences: list[list[int]]) -> None:
    """Both hosts, both accelerated, find the same best translations."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.BartForConditionalGeneration.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    rows, pad, end = sentences[:100], 1, 2
    found, calls = judge.ours(lambda: translate(translator, rows))
    judge.assert_over_the_tree(calls)
    ids = padded(rows, pad, left=False)
    with judge.configured(strict=True):
        output = model.generate(
            input_ids=ids,
            attention_mask=ids.ne(pad).long(),
            num_beams=BEAMS,
            max_new_tokens=LONGEST + 1,
            early_stopping=True,
        )
    theirs = [row[1 : row.index(end, 1) + 1] for row in output.tolist()]
    ours = [hypotheses[0]["tokens"].tolist() for hypotheses in found]
    different = [number for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    assert not different, (different, [(ours[i], theirs[i]) for i in different[:2]])
