"""Greedy search and sampling: the best token of each row, or one from the random stream of its sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import AFTER, AT_ONCE, Table, after, decode, drawn_table, stops

from fastgen.decoding.sampling import Sampling

FILL = 4


def sampling(sentences: int, samples: int, length: int, seeds: Sequence[int] | None = None) -> Sampling:
    return Sampling(torch.zeros(sentences * samples, 1, dtype=torch.int64), samples, length, FILL, seeds)


def test_greedy() -> None:
    search = sampling(2, 1, 5)
    decode(search, after, partial(search.choose, is_stopped=stops([1], 5)))
    found = search.result()
    assert found.tokens.tolist() == [[[0, 2, 1, FILL, FILL]]] * 2 and search.length == 3
    first, second = (torch.tensor(AFTER[token]).log_softmax(-1) for token in (0, 2))
    assert found.scores.flatten().tolist() == pytest.approx([float(first[2] + second[1])] * 2)
    assert not search.ranks and not search.takes_logits
    assert search.choose_allowed(torch.zeros(2, 5), torch.tensor([3]), stops([1], 5)) is None


def test_nothing_ends_before_the_maximal_length() -> None:
    search = sampling(1, 1, 3)
    decode(search, after, partial(search.choose, is_stopped=stops([], 3)))
    assert search.result().tokens.tolist() == [[[0, 2, 1]]]


def test_one_of_three_ends_at_once() -> None:
    search, is_stopped, banned = sampling(3, 2, 4), stops([1], 4), [-9.0, -math.inf, -1.0, -2.0, -8.0]
    scores = torch.tensor([AFTER[0], AT_ONCE, AT_ONCE, AT_ONCE, AFTER[0], banned])
    assert search.choose(scores, is_stopped).tolist() == [0, 1, 2, 3, 4, 5]
    assert search.running()[:, 1].tolist() == [2, 1, 1, 1, 2, 2]
    assert search.finished_mask().tolist() == [False, True, False] and search.num_finished() == 1
    tokens, scores = search.hypotheses(1)
    assert tokens.tolist() == [[0, 1, FILL, FILL]] * 2
    assert scores.tolist() == pytest.approx([float(torch.tensor(AT_ONCE).log_softmax(-1)[1])] * 2)
    assert search.evict(search.finished_mask()).tolist() == [0, 2] and search.batch == 2
    search.choose(torch.tensor([AFTER[2], AFTER[2], AFTER[2], AFTER[3]]), is_stopped)
    search.choose(torch.tensor([AFTER[3]] * 4), is_stopped)
    assert search.done
    ends = [[0, 2, 1, FILL], [0, 1, FILL, FILL]]
    assert search.result().tokens.tolist() == [ends, [ends[1]] * 2, [ends[0], [0, 2, 2, 2]]]


def test_no_probabilities_to_draw_from() -> None:
    search = sampling(1, 1, 4, seeds=[0])
    with pytest.raises(ValueError, match="no probabilities to draw from"):
        search.choose(torch.full((1, 5), -math.inf), stops([1], 4))
    assert search.length == 1


def searched(
    table: Table, sentence: int, samples: int, ends: Sequence[int], length: int, seed: int | None
) -> list[tuple[list[int], float]]:
    """The tokens of each row of a sentence and the sums of their log-probabilities."""
    stream = None if seed is None else torch.Generator().manual_seed(seed)
    rows, sums, ended = [[0] for _ in range(samples)], [0.0] * samples, [False] * samples
    while not all(ended) and len(rows[0]) < length:
        scores = torch.tensor([table(sentence, tuple(row)) for row in rows])
        chosen = scores.argmax(-1) if seed is None else torch.multinomial(scores.exp(), 1, generator=stream)[:, 0]
        for row, token in enumerate(chosen.tolist()):
            sums[row] += 0.0 if ended[row] else table(sentence, tuple(rows[row]))[token]
            rows[row].append(FILL if ended[row] else token)
            ended[row] = ended[row] or token in ends
    return [(row + [FILL] * (length - len(row)), score) for row, score in zip(rows, sums, strict=True)]


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("ends", [[1], [1, 5]])
@pytest.mark.parametrize("samples", [1, 3])
def test_as_on_lists(samples: int, ends: Sequence[int], draws: bool, evicts: bool) -> None:
    """Each sentence by itself, with a stream of its own."""
    left = 0
    for seed in range(8):
        seeds = [seed, 7, 3 * seed] if draws else None
        table = drawn_table(seed, 6, ends)
        search = sampling(3, samples, 9, seeds)
        left += decode(search, table, partial(search.choose, is_stopped=stops(ends, 9)), evicts)
        found = search.result()
        for sentence in range(3):
            expected = searched(table, sentence, samples, ends, 9, None if seeds is None else seeds[sentence])
            assert found.tokens[sentence].tolist() == [tokens for tokens, _ in expected]
            assert found.scores[sentence].tolist() == pytest.approx([score for _, score in expected], abs=1e-5)
    assert (left > 0) == evicts
