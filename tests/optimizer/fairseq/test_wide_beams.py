"""Searches of fairseq with many beams, each of which attends to its own path: the hypotheses stay the host's."""

from __future__ import annotations

import copy
import functools
from typing import Any

import fairseq_models as models
import judge
import path_rows
import pytest
import torch
from fairseq import search
from fairseq.data import Dictionary

from fastgen import ops
from fastgen.cache import tree, wide_tree
from fastgen.cache.wide_tree import WIDE_FROM, WideTree
from fastgen.optimizer.fairseq.model import attention
from fastgen.replay import statistics

pytestmark = pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="no native operators")

WORDS = 409
_load = models.load.__wrapped__  # that of the kit, of which `load` takes the place
NAMES = ("post-norm", "pre-norm", "learned", "bart")


@functools.cache
def dictionary() -> Dictionary:
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(f"w{number}")
    return words


@functools.cache
def load(name: str, seed: int = 0) -> Any:
    """A tiny random model with words enough for a hundred beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "dictionary", dictionary)
        return _load(name, seed)


@pytest.fixture(autouse=True)
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the operator; and models have more words here."""
    monkeypatch.setattr(models, "dictionary", dictionary)
    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(models, "WORDS", WORDS)
    return path_rows.counted(attention, monkeypatch)


@pytest.mark.parametrize("beams", [32, 50, 100])
@pytest.mark.parametrize("name", NAMES)
def test_identical(name: str, beams: int, attended: list[int]) -> None:
    judge.compare(lambda: models.generate(name, models.batch([9, 5]), beam_size=beams, max_len_b=7))
    assert attended and {rows % beams for rows in attended} == {0}


@pytest.mark.parametrize(
    "options",
    [
        dict(min_len=6),
        dict(len_penalty=0.0),
        dict(len_penalty=-1.0, normalize_scores=False),
        dict(unk_penalty=2.0, temperature=1.3),
        dict(max_len_a=0.5, max_len_b=3),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], attended: list[int]) -> None:
    options = {"max_len_b": 8, **options}
    judge.compare(lambda: models.generate("post-norm", models.batch(), beam_size=40, **options))
    assert attended


def test_sentences_leave(attended: list[int]) -> None:
    sample = models.batch([2 + number * 5 % 13 for number in range(20)])
    judge.compare(lambda: models.generate("learned", sample, beam_size=33, max_len_b=24))
    assert len(set(attended)) > 2


PREFIXES = {
    "of one": [[5], [6], [7], [8]],
    "ragged": [[5, 6, 7], [8, 1, 1], [1, 1, 1], [9, 10, 1]],
    "with an end": [[5, 2, 1], [8, 9, 10], [6, 7, 2], [9, 10, 1]],
}


@pytest.mark.parametrize("name", ["post-norm", "lm"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix: str, name: str, attended: list[int]) -> None:
    """A forced token leaves beams without a score, which may be fed padding."""
    tokens = torch.tensor(PREFIXES[prefix])
    judge.compare(lambda: models.generate(name, models.batch(), prefix=tokens, beam_size=32, max_len_b=7))
    assert bool(attended) == (prefix != "with an end")  # all beams end there, also those that are fed padding


def test_language_models_and_ensembles(attended: list[int]) -> None:
    judge.compare(lambda: models.prompted("lm", beam_size=50, max_len_b=14))
    assert attended
    attended.clear()
    two = [load("post-norm"), load("learned", seed=1)]
    judge.compare(lambda: models.generate(two, models.batch([9, 4]), beam_size=34, max_len_b=6))
    judge.compare(
        lambda: models.generate(
            "post-norm", models.batch([9, 4]), beam_size=34, max_len_b=6, lm_model=load("lm"), lm_weight=0.4
        )
    )
    assert attended


STRATEGIES = {
    "diverse": functools.partial(search.DiverseBeamSearch, num_groups=4, diversity_strength=0.7),
    "siblings": functools.partial(search.DiverseSiblingsSearch, diversity_rate=0.5),
    "sampling": functools.partial(search.Sampling, sampling_topk=12),
    "prefix": functools.partial(
        search.PrefixConstrainedBeamSearch,
        prefix_allowed_tokens_fn=lambda sentence, tokens: [2, *range(4 + int(tokens[-1]) % 7, WORDS, 3)],
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, attended: list[int]) -> None:
    options = dict(strategy=STRATEGIES[strategy], beam_size=32, max_len_b=6)
    judge.compare(lambda: models.generate("post-norm", models.batch([9, 5]), **options))
    assert attended


def test_slots_are_pruned_and_grow(attended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 3)
    prunings: list[int] = []
    prune = WideTree._prune

    def counted(self: WideTree, slots: torch.Tensor) -> None:
        prunings.append(slots.shape[1])
        prune(self, slots)

    monkeypatch.setattr(WideTree, "_prune", counted)
    options = dict(beam_size=32, max_len_b=20, min_len=20)
    judge.compare(lambda: models.generate("learned", models.batch([5, 9]), **options))
    assert attended and prunings
    monkeypatch.setattr(tree, "_WORTH_PRUNING", -1.0)
    prunings.clear()
    judge.compare(lambda: models.generate("learned", models.batch([5, 9]), **options))
    assert not prunings


def test_recorded_steps(attended: list[int], recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in later calls on the same buffers, with other sources, and after the tree has grown."""
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 6)
    model = copy.deepcopy(load("post-norm"))
    for seed in range(3):
        before = statistics.counts(model).replays
        sample = models.batch([9, 5], seed=seed)
        judge.compare(lambda sample=sample: models.generate(model, sample, beam_size=32, max_len_b=13, min_len=13))
        assert statistics.counts(model).replays >= before + 6 and attended
    for length in (11, 15):  # with room for fewer and more steps on a path
        judge.compare(lambda n=length: models.generate(model, models.batch([9, 5]), beam_size=32, max_len_b=n))


def test_fewer_beams_and_other_decoders_have_masks(attended: list[int]) -> None:
    judge.compare(lambda: models.generate("post-norm", models.batch([5]), beam_size=WIDE_FROM - 1, max_len_b=4))
    judge.compare(lambda: models.generate("prophetnet", models.batch([5]), beam_size=32, max_len_b=4))
    with judge.configured(cache="x"):
        judge.compare(lambda: models.generate("post-norm", models.batch([5]), beam_size=32, max_len_b=4))
    assert not attended


def test_a_path_that_is_not_followed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons can fail: without reordering the paths they do."""
    monkeypatch.setattr(WideTree, "reorder", lambda self, parents: None)
    with pytest.raises(AssertionError):
        judge.compare(lambda: models.generate("pre-norm", models.batch(), beam_size=32, max_len_b=7))


@pytest.mark.parametrize("beams", [WIDE_FROM - 1, WIDE_FROM])
def test_a_prefix_that_ends(beams: int) -> None:
    """All beams end there, those too that have no probability; the attention is that of each."""
    words = models.batch([6])
    prefix = torch.tensor([[23, models.EOS]])
    judge.compare(lambda: models.generate("post-norm", words, prefix=prefix, beam_size=beams, max_len_b=8))
