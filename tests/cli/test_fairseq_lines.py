"""What the workers of fastgen-generate do, and the scoring of it, against fairseq's own functions."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit
import torch
from fairseq import utils
from fairseq.data import Dictionary, data_utils

from fastgen.pipeline.fairseq import lines, load
from fastgen.pipeline.fairseq.scoring import Scoring


@pytest.mark.parametrize("post_process", sorted(lines.POST_PROCESSORS, key=str))
def test_strings_are_those_of_the_dictionary(post_process: str | None) -> None:
    dictionary = Dictionary()
    for word in ("a@@", "b", "\u2581c", "d", "\u2581", "@@", "e@@@", "x y"):
        dictionary.add_symbol(word)
    plain = load.plain_dictionary(dictionary, post_process)
    assert isinstance(plain, lines.Symbols)
    chance = random.Random(1)
    for _ in range(300):
        ids = [chance.randrange(len(dictionary) + 2) for _ in range(chance.randrange(9))]
        for options in ({}, {"escape_unk": True}, {"extra_symbols_to_ignore": {5, 2}}):
            wanted = dictionary.string(torch.tensor(ids, dtype=torch.int32), post_process, **options)
            assert plain.string(ids, post_process, **options) == wanted


def test_every_post_processor_of_ours_is_fairseqs() -> None:
    for name, process in lines.POST_PROCESSORS.items():
        for text in ("", "a@@ b", "\u2581a b \u2581c", "a b @@", " x"):
            assert process(text) == data_utils.post_process(text, name)


def test_a_dictionary_with_strings_of_its_own_is_used_itself() -> None:
    class Own(Dictionary):
        def string(self, *_: Any, **__: Any) -> str:
            return "own"

    assert isinstance(load.plain_dictionary(Own(), None), Own)
    assert isinstance(load.plain_dictionary(Dictionary(), "letter"), Dictionary)


def test_new_words_get_the_numbers_that_stock_gives_them() -> None:
    """libbleu takes some n-grams for others, depending on these numbers, so the score would tell."""
    chance = random.Random(3)
    pieces = [f"p{i}@@" for i in range(30)] + [f"e{i}" for i in range(30)]

    class Scorer:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def add(self, reference: torch.Tensor, hypothesis: torch.Tensor) -> None:
            assert isinstance(reference, torch.IntTensor) and isinstance(hypothesis, torch.IntTensor)
            self.seen += [reference.tolist(), hypothesis.tolist()]

    def new_dictionary() -> Dictionary:
        dictionary = Dictionary()
        for piece in pieces:
            dictionary.add_symbol(piece)
        return dictionary

    stock, ours, dictionary = Scorer(), Scorer(), new_dictionary()
    scoring = Scoring(ours, new_dictionary(), by_words=True)
    for _ in range(30):
        sentences = [torch.tensor([4 + chance.randrange(60) for _ in range(5)]) for _ in range(4)]
        target, *texts = [dictionary.string(ids, "@@ ", escape_unk=True) for ids in sentences]
        for rank, ids in enumerate(sentences[1:]):
            _, text, _ = utils.post_process_prediction(ids, "", None, None, dictionary, remove_bpe="@@ ")
            assert text == texts[rank]
            if rank == 0:
                stock.add(dictionary.encode_line(target), dictionary.encode_line(text))
        scoring.add(lines.Scored(target, texts[0], [], [], texts))
    assert ours.seen == stock.seen
    assert len(dictionary) > 100  # most words were new


def test_workers_need_no_fairseq_to_make_lines() -> None:
    """What a worker imports decides how soon it is there."""
    code = "import sys, fastgen.cli.generate, fastgen.pipeline.fairseq.lines; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=fairseq_kit.environment(), capture_output=True, text=True, check=True
    )
    assert not {"torch", "fairseq", "transformers", "numpy"} & set(run.stdout.split())


def test_a_codec_that_cannot_be_pickled_runs_in_the_parent() -> None:
    plain = lines.Symbols([], 0, 2, 3, "<unk>")
    form = lines.Format(
        plain, plain, 1, "<unk>", None, frozenset({2}), io.BytesIO(), None, None, False, None, False, False
    )
    assert load.can_travel(form)
    form = lines.Format(
        plain, plain, 1, "<unk>", None, frozenset({2}), lambda x: x, None, None, False, None, False, False
    )
    assert not load.can_travel(form)
