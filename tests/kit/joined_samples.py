"""fairseq's samples that decode together, and what stock makes of each."""

from __future__ import annotations

import contextlib
from typing import Any

import fairseq_models as models
import judge
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment

import fastgen
from fastgen import report
from fastgen.optimizer.fairseq.generate import continuous_batch

LENGTHS = ((9, 5, 12), (7, 7), (3, 10, 6, 4), (5,), (12, 11, 2), (8, 9), (4, 4, 4))
SENTENCES = 8
PLENTY = 10**6  # of tokens


def samples(left: bool = True) -> list[dict[str, Any]]:
    return [models.batch(lengths, left, seed) for seed, lengths in enumerate(LENGTHS)]


def generator_of(name: str, **options: Any) -> tuple[list[Any], Any]:
    kind = SequenceGeneratorWithAlignment if name.startswith("align") else SequenceGenerator
    loaded = [models.load(name)]
    models.forget_beams(loaded)
    return loaded, kind(loaded, models.dictionary(), **{"beam_size": 4, "max_len_a": 0.8, "max_len_b": 5, **options})


def each(name: str, given: list[dict[str, Any]], **options: Any) -> list[Any]:
    """What stock makes of each sample; it bans no n-grams, so there what we make of it alone (see test_options)."""
    with contextlib.nullcontext() if "no_repeat_ngram_size" in options else fastgen.disabled():
        loaded, generator = generator_of(name, **options)
        return [generator.generate(loaded, sample) for sample in given]


def refilled(
    name: str, given: list[dict[str, Any]], sentences: int = SENTENCES, tokens: int = PLENTY, **options: Any
) -> list[Any]:
    report.reset()
    loaded, generator = generator_of(name, **options)
    results: list[Any] = [None] * len(given)
    with judge.configured(strict=True, history=64):
        for number, result in continuous_batch.run(lambda s: generator.generate(loaded, s), given, sentences, tokens):
            assert results[number] is None
            results[number] = result
    return results


def assert_same(expected: list[Any], results: list[Any]) -> None:
    for theirs, mine in zip(expected, results, strict=True):
        judge.assert_same(theirs, mine)
