"""The n-gram ban with ignored words, against the published rule word by word."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import unilm_kit as kit
from transformers import GenerationConfig, LogitsProcessorList, NoRepeatNGramLogitsProcessor

from fastgen.models.unilm import NoRepeatNGramExceptLogitsProcessor

INPUTS = kit.padded(kit.sources(6, 3))
OPTIONS = {"num_beams": 3, "max_new_tokens": 14}


def is_banned(rows: list[list[int]], size: int, prompt: int, ignored: Any) -> list[set[int]]:
    scores = torch.randn(len(rows), 7)
    before = scores.clone()
    after = NoRepeatNGramExceptLogitsProcessor(size, prompt, ignored)(torch.tensor(rows), scores)
    assert torch.equal(scores, before), "the scores given are the caller's"
    banned = after == -torch.inf
    assert torch.equal(after[~banned], scores[~banned])
    return [set(row.nonzero().flatten().tolist()) for row in banned]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", [0, 4])
def test_rule(size: int, prompt: int) -> None:
    rng = random.Random(size)
    some = 0
    for length in range(prompt, prompt + 40):
        rows = [[rng.randrange(4 if size < 5 else 2) for _ in range(length)] for _ in range(3)]
        ignored = rng.sample(range(7), 2) if size > 1 and length % 3 else []
        expected = [kit.banned_words(row[prompt:], size, ignored) for row in rows]
        assert is_banned(rows, size, prompt, ignored) == expected
        some += sum(map(len, expected))
    assert some > 10


def test_ignored_words() -> None:
    # 1 2 3 1 2: 3 would be again; not if it is ignored, nor if a word before it is. Other n-grams stay banned.
    for ignored, banned in (([], {3}), ([3], set()), ([1], set()), ([2], set()), ([0, 6], {3})):
        assert is_banned([[1, 2, 3, 1, 2]], 3, 0, ignored) == [banned]


def test_refuses_other_sizes() -> None:
    for arguments in ((0, 0), (2, -1)):
        with pytest.raises(ValueError, match="must be"):
            NoRepeatNGramExceptLogitsProcessor(*arguments)


def tokens(model: Any, **options: Any) -> list[list[int]]:
    return kit.generate(model, INPUTS, **{**OPTIONS, **options}).sequences.tolist()


def test_ways_to_ask_for_it() -> None:
    model, width = kit.model(end=-60.0), INPUTS["input_ids"].shape[1]
    plain = tokens(model)
    ignored = sorted({word for row in plain for word in row[width:]})
    expected = tokens(model, no_repeat_ngram_size=2, forbid_ignore_ids=ignored)
    assert expected == plain  # every word of it is ignored
    own = LogitsProcessorList([NoRepeatNGramExceptLogitsProcessor(2, width, ignored)])
    assert tokens(model, logits_processor=own) == expected
    config = GenerationConfig(no_repeat_ngram_size=2, forbid_ignore_ids=ignored, **OPTIONS)
    assert kit.generate(model, INPUTS, generation_config=config).sequences.tolist() == expected
    without = tokens(model, no_repeat_ngram_size=2)
    model.generation_config.forbid_ignore_ids = ignored
    assert tokens(model, no_repeat_ngram_size=2) == expected
    assert tokens(model, no_repeat_ngram_size=2, forbid_ignore_ids=[]) == without != expected


def test_the_source_does_not_count() -> None:
    """Where a target begins with a word of its source; with the host's own processor, given by hand, it can't."""
    model, words = kit.model(), torch.arange(5, kit.VOCABULARY)
    inputs = kit.padded([[kit.CLS, word, kit.SEP] for word in words.tolist()])

    def first(**options: Any) -> torch.Tensor:
        sequences: torch.Tensor = kit.generate(model, inputs, max_new_tokens=1, **options).sequences
        return sequences[:, -1]

    repeats = first() == words
    assert repeats.any()
    assert torch.equal(first(no_repeat_ngram_size=1), first())
    hosts = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    assert (first(logits_processor=hosts) != words)[repeats].all()


@pytest.mark.parametrize("ignored", [9, [99], [None], [-1], "words"])
def test_tokens_that_are_none(ignored: Any) -> None:
    with pytest.raises(ValueError, match="forbid_ignore_ids"):
        kit.model().generate(torch.tensor([kit.sources(4)[0]]), no_repeat_ngram_size=2, forbid_ignore_ids=ignored)


def test_the_calls_list_stands_over_the_models() -> None:
    """An empty one, too."""
    model, inputs = kit.model(), kit.padded(kit.sources(9, 4))
    options = dict(num_beams=2, max_new_tokens=16, no_repeat_ngram_size=1, eos_token_id=None)
    plain = kit.generate(model, inputs, **options).sequences
    model.generation_config.forbid_ignore_ids = list(range(5, kit.VOCABULARY))
    assert not torch.equal(kit.generate(model, inputs, **options).sequences, plain)
    assert torch.equal(kit.generate(model, inputs, forbid_ignore_ids=[], **options).sequences, plain)
    assert torch.equal(
        kit.generate(model, inputs, forbid_ignore_ids=torch.tensor([], dtype=int), **options).sequences, plain
    )
