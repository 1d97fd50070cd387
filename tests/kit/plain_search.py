"""Tables of log-probabilities in place of a model, and the loop that takes a search over them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy
from fastgen.decoding.device_beam_search import DeviceBeamSearch
from fastgen.decoding.native_beam_search import NativeBeamSearch
from fastgen.decoding.search import Hypotheses, IsStopped
from fastgen.decoding.static_beam_search import StaticBeamSearch
from fastgen.replay.replayer import Replayer

CPU = torch.device("cpu")
Table = Callable[[int, tuple[int, ...]], list[float]]  # log-probabilities [V], by the sentence and its tokens so far
# What follows each token, in numbers whose sums are easy to follow; 0 begins, 1 ends.
AFTER = {
    0: [-9.0, -3.0, -1.0, -2.0, -8.0],
    2: [-9.0, -0.5, -4.0, -1.25, -7.0],
    3: [-9.0, -2.5, -0.4, -5.0, -6.0],
}
AT_ONCE = [-9.0, -0.5, -7.0, -8.0, -2.0]  # ends with 1, and with 4 where that ends too
# Two sentences of two beams: the best of the first come from its second beam; of the second, from both.
CROSSING = [
    [-9.0, -8.0, -7.0, -6.5, -6.0],
    [-9.5, -8.5, -0.5, -1.0, -6.5],
    [-9.0, -8.0, -7.0, -2.0, -6.0],
    [-0.5, -8.0, -7.0, -6.5, -6.0],
]


class Hypothesis(NamedTuple):
    """One that runs or has ended; the score comes first, so that the best is the largest."""

    score: float
    tokens: tuple[int, ...]  # with the prompt
    rows: tuple[int, ...] = ()  # that chose each token after the prompt


def after(sentence: int, tokens: tuple[int, ...]) -> list[float]:
    return AFTER[tokens[-1]]


def drawn_table(seed: int, vocabulary: int, ends: Sequence[int] = (1,)) -> Table:
    """Random, by the whole prefix or, where the seed is odd, the last token; what `ends` a hypothesis is likelier.

    The length counts too, or the same pairs of tokens in another order would be a tie.
    """

    @functools.cache
    def table(sentence: int, tokens: tuple[int, ...]) -> list[float]:
        source = random.Random(f"{seed} {sentence} {len(tokens)} {tokens[-1] if seed % 2 else tokens}")
        logits = [source.gauss(1.0 if token in ends else 0.0, 2.0) for token in range(vocabulary)]
        log_sum = math.log(sum(map(math.exp, logits)))
        return [logit - log_sum for logit in logits]

    return table


def continued(table: Table, sentence: int, running: Sequence[Hypothesis], first_row: int) -> list[Hypothesis]:
    """All that are a token longer, the best first; `first_row`: the row of the first that runs."""
    found = [
        Hypothesis(hypothesis.score + gain, (*hypothesis.tokens, token), (*hypothesis.rows, row))
        for row, hypothesis in enumerate(running, first_row)
        for token, gain in enumerate(table(sentence, hypothesis.tokens))
    ]
    return sorted(found, reverse=True)


def stops(ends: Sequence[int], max_length: int) -> IsStopped:
    def is_stopped(tokens: Tensor, hypotheses: Callable[[], Tensor]) -> Tensor:
        so_far = hypotheses()
        assert torch.equal(so_far[:, -1], tokens.flatten())
        return torch.isin(tokens, torch.tensor(ends, dtype=torch.int64)) | (so_far.shape[1] >= max_length)

    return is_stopped


def beam_search(
    kind: str, sentences: int, beams: int, policy: FinishingPolicy, ends: Sequence[int] = (1,), **static: Any
) -> BeamSearch:
    """`kind`: "static", "device", "torch" or any other; `static`: a static one's further arguments. All begin, and are
    filled, with 0."""
    prompt, candidates = torch.zeros(sentences * beams, 1, dtype=torch.int64), max(2, 1 + len(ends)) * beams
    if kind == "device":
        return DeviceBeamSearch(prompt, beams, candidates, policy, 0, may_repeat_step=True)
    if kind == "torch":
        return BeamSearch(prompt, beams, candidates, policy, 0)
    if kind != "static":
        return NativeBeamSearch(prompt, beams, candidates, policy, 0)
    static = {"replayer": Replayer(CPU), "ends": torch.tensor(ends, dtype=torch.int64), "is_late": False} | static
    return StaticBeamSearch(prompt, beams, candidates, policy, 0, **static)


def scores_of(table: Table, search: Any, sentences: Sequence[int]) -> Tensor:
    """Of the next tokens, float32 `[B*M, V]`, with these live sentences."""
    rows = search.running().unflatten(0, (-1, search.beams)).tolist()
    numbered = zip(sentences, rows, strict=True)
    return torch.tensor([table(number, tuple(tokens)) for number, beams in numbered for tokens in beams])


def decode(search: Any, table: Table, choose: Callable[[Tensor], Tensor], evicts: bool = False) -> int:
    """Take all steps, each with the parents that `choose` returns; returns how many sentences have left before."""
    sentences = list(range(search.batch))
    batch = len(sentences)
    while True:
        before = search.running().clone()
        parents = choose(scores_of(table, search, sentences))
        assert torch.equal(search.running()[:, :-1], before[parents])
        if search.done:
            return batch - len(sentences)
        leaving = search.finished_mask()
        if evicts and search.num_finished() and bool(leaving.any()) and not bool(leaving.all()):
            sentences = [sentences[row] for row in search.evict(leaving).tolist()]


def assert_found(found: Hypotheses, expected: Sequence[Sequence[Hypothesis]]) -> None:
    assert found.tokens.shape[:2] == found.scores.shape == (len(expected), len(expected[0]))
    for sentence, hypotheses in enumerate(expected):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert found.scores[sentence].tolist() == pytest.approx(scores, rel=1e-5, abs=1e-6)
        for place, (_, tokens, rows) in enumerate(hypotheses):
            actual, chosen_by = found.tokens[sentence, place].tolist(), found.rows[sentence, place].tolist()
            assert actual == [*tokens] + [0] * (len(actual) - len(tokens))
            assert chosen_by == [*rows] + [-1] * (len(chosen_by) - len(rows))
