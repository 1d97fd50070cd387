"""Beam search with fairseq's rules: a sentence is done once as many hypotheses have ended as it has beams."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import AFTER, AT_ONCE, CPU, CROSSING, Hypothesis, Table, after, continued, decode, drawn_table
from torch import Tensor

from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch
from fastgen.replay.replayer import Replayer

START, END, PAD = 0, 1, 4


def search_of(
    batch: int, beams: int, penalty: float = 1.0, is_normalised: bool = True, length: int = 5, **options: Any
) -> FairseqBeamSearch:
    policy = CollectingPolicy(penalty, is_normalised, length)
    return FairseqBeamSearch(batch, beams, policy, start=START, end=END, pad=PAD, device=CPU, **options)


def choose(search: FairseqBeamSearch, scores: Tensor) -> Tensor:
    """As fairseq's loop does: at the maximal length all end. A part of the scores passes for the attention."""
    attention = scores[:, :3]
    if search.step == search.policy.max_length:
        scores = scores.index_fill(
            1, torch.tensor([token for token in range(scores.shape[1]) if token != END]), -math.inf
        )
    return search.choose(scores, attention)


def assert_found(found: list[dict[str, Any]], table: Table, sentence: int, expected: list[Hypothesis]) -> None:
    assert len(found) == len(expected)
    for actual, (score, tokens, _) in zip(found, expected, strict=True):
        assert actual["tokens"].tolist() == list(tokens[1:])
        assert float(actual["score"]) == pytest.approx(score, rel=1e-5)
        before = [table(sentence, tokens[:length]) for length in range(1, len(tokens))]
        gained = [scores[token] for scores, token in zip(before, tokens[1:], strict=True)]
        assert actual["positional_scores"].tolist() == pytest.approx(gained, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(actual["attention"], torch.tensor(before)[:, :3].t())  # [N, length]


@pytest.mark.parametrize(
    ("penalty", "is_normalised", "first", "second"),
    [
        (1.0, True, (-0.75, (0, 2, 1)), (-2.9 / 3, (0, 3, 2, 1))),
        (0.0, True, (-1.5, (0, 2, 1)), (-2.9, (0, 3, 2, 1))),
        (-1.0, True, (-3.0, (0, 2, 1)), (-8.7, (0, 3, 2, 1))),
        (2.0, True, (-2.9 / 9, (0, 3, 2, 1)), (-0.375, (0, 2, 1))),
        (2.0, False, (-1.5, (0, 2, 1)), (-2.9, (0, 3, 2, 1))),
    ],
)
def test_two_have_ended(penalty: float, is_normalised: bool, first: Any, second: Any) -> None:
    search = search_of(2, 2, penalty, is_normalised)
    decode(search, after, partial(choose, search))
    assert search.step == 3
    for sentence, found in enumerate(search.result()):
        assert_found(found, after, sentence, [Hypothesis(*first), Hypothesis(*second)])


def test_nothing_ends_before_the_maximal_length() -> None:
    """It leaves out the token that ends a hypothesis: three tokens, and the end."""

    def without_end(sentence: int, tokens: tuple[int, ...]) -> list[float]:
        banned = END if len(tokens) < 4 else None
        return [-math.inf if token == banned else score for token, score in enumerate(AFTER[tokens[-1]])]

    search = search_of(1, 2, length=3)
    decode(search, without_end, partial(choose, search))
    expected = [Hypothesis(-3.15 / 4, (0, 2, 3, 2, END)), Hypothesis(-6.15 / 4, (0, 3, 2, 3, END))]
    assert_found(search.result()[0], without_end, 0, expected)


def test_one_of_three_ends_at_once() -> None:
    search = search_of(3, 1)
    assert search.choose(torch.tensor([AFTER[START], AT_ONCE, AFTER[START]])).tolist() == [0, 1, 2]
    assert search.finished_mask().tolist() == [False, True, False] and search.num_finished() == 1
    assert search.evict(search.finished_mask()).tolist() == [0, 2]
    assert search.running().tolist() == [[START, 2]] * 2
    assert search.choose(torch.tensor([AFTER[2]] * 2)).tolist() == [0, 1] and search.done
    found = [(float(one["score"]), one["tokens"].tolist(), one["attention"].numel()) for (one,) in search.result()]
    assert found == [(-0.75, [2, END], 0), (-0.5, [END], 0), (-0.75, [2, END], 0)]


def test_parents_are_rows() -> None:
    search = search_of(2, 2)
    search.choose(torch.tensor([AFTER[START]] * 4))
    assert search.choose(torch.tensor(CROSSING)).tolist() == [1, 1, 3, 2]
    assert search.running().tolist() == [[0, 3, 2], [0, 3, 3], [0, 3, 0], [0, 2, 3]]
    assert search.written().tolist() == [[*row, PAD, PAD, PAD, PAD] for row in search.running().tolist()]


def test_what_is_banned_does_not_end() -> None:
    """Not even where there is but one candidate, and the second is one of those that are equal."""
    for end in (0, 1, 2):
        search = FairseqBeamSearch(1, 2, CollectingPolicy(1.0, True, 5), start=0, end=end, pad=PAD, device=CPU)
        search.choose(torch.tensor([[-math.inf, -math.inf, -math.inf, -1.0]] * 2))
        assert search.state.count.item() == 0 and search.running()[0].tolist() == [START, 3]


def test_beams_become_the_first_of_their_sentence() -> None:
    search = search_of(2, 2)
    search.choose(torch.tensor([AFTER[START]] * 4))
    search.level(torch.tensor([True, False]))
    assert search.running()[:, 1].tolist() == [2, 2, 2, 3]
    assert search.state.last.tolist() == [[-1.0, -1.0], [-1.0, -2.0]]


# ---------------------------------------------------------------------------------------------- the rules, on lists
def searched(table: Table, sentence: int, beams: int, policy: CollectingPolicy) -> tuple[list[Hypothesis], int]:
    """What ends, the best first, and after how many steps the sentence is done."""
    running, ended = [Hypothesis(0.0, (START,))], list[Hypothesis]()
    for length in range(1, policy.max_length + 2):
        found = continued(table, sentence, running, 0)
        if length == policy.max_length + 1:
            found = [hypothesis for hypothesis in found if hypothesis.tokens[-1] == END]
        ending = [hypothesis for hypothesis in found[:beams] if hypothesis.tokens[-1] == END]
        divisor = length**policy.length_penalty if policy.is_normalised else 1.0
        ended += [each._replace(score=each.score / divisor) for each in ending[: beams - len(ended)]]
        if len(ended) == beams:
            break
        running = [hypothesis for hypothesis in found[: 2 * beams] if hypothesis.tokens[-1] != END][:beams]
    return sorted(ended, reverse=True), length


def compare(search: FairseqBeamSearch, table: Table, evicts: bool) -> tuple[int, int]:
    """With the rules on lists; returns how many sentences have left, and how many steps too many were taken."""
    left = decode(search, table, partial(choose, search), evicts)
    expected = [searched(table, sentence, search.beams, search.policy) for sentence in range(3)]
    for sentence, (found, (hypotheses, _)) in enumerate(zip(search.result(), expected, strict=True)):
        assert_found(found, table, sentence, hypotheses)
    return left, search.step - max(steps for _, steps in expected)


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize(("penalty", "is_normalised"), [(1.0, True), (0.0, True), (-0.5, True), (2.0, False)])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_as_on_lists(beams: int, penalty: float, is_normalised: bool, evicts: bool) -> None:
    searches = [search_of(3, beams, penalty, is_normalised, length=9) for _ in range(8)]
    left, late = zip(*(compare(each, drawn_table(seed, 8), evicts) for seed, each in enumerate(searches)), strict=True)
    assert (sum(left) > 0) == evicts and not any(late)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("evicts", [False, True])
def test_recorded_steps(evicts: bool) -> None:
    """The next request goes on with them, also where sentences left the one before."""
    left = 0
    for seed in range(6):
        first, second = Replayer(CPU), Replayer(CPU)
        first.retains_buffers = True
        search = search_of(3, 2, length=12, replayer=first)
        left_now, late = compare(search, drawn_table(seed, 8), evicts)
        left += left_now
        assert late <= first.waits_for_nothing and first.failure is None
        search.restore_first_buffers()
        if first.has_captured(None):  # before any sentence left
            search.restart(second)
            compare(search, drawn_table(seed + 1, 8), False)
            assert second.counts.captures == 0 and second.counts.replays >= search.step - 2
    assert (left > 0) == evicts and second.counts.replays > 0
