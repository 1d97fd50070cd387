"""What is decided while a beam search runs: always a beginning of what comes out, and all of it in the end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import CPU, beam_search, drawn_table, scores_of, stops
from torch import Tensor

from fastgen import ops
from fastgen.decoding import front
from fastgen.decoding.beam_search import FinishingPolicy
from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch
from fastgen.decoding.front import Contenders, DecidedFront

EARLY = (True, False, "never")
PENALTIES = (-2.0, -0.5, 0.0, 1.0, 2.0)
ENDS: Sequence[Sequence[int]] = ((1,), (1, 4), ())
LENGTH = 12


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_native", lambda device: False)


@dataclasses.dataclass
class Streamed:
    """What one search has told, step by step."""

    steps: list[list[int]]  # of sentence 0, all that was told after each step but the last
    told: Tensor  # in the end, int64 [n, B]
    best: Tensor  # the best hypotheses, int64 [B, L], without the first token
    lags: list[int]  # tokens of the live beams that were not told


def assert_streamed(streamed: Streamed) -> None:
    assert torch.equal(streamed.told.t(), streamed.best)
    best = streamed.best[0].tolist()
    for told in streamed.steps:
        assert told == best[: len(told)]


def common(hypotheses: Sequence[Sequence[int]]) -> int:
    """How many tokens all of these begin with."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*hypotheses, strict=False))
    return len(list(same))


def of_transformers(
    kind: str, seed: int, sentences: int, beams: int, policy: FinishingPolicy, ends: Sequence[int]
) -> Streamed:
    search, told = beam_search(kind, sentences, beams, policy, ends), DecidedFront(1)
    table, is_stopped = drawn_table(seed, 9, ends), stops(ends, policy.max_length)
    found: list[Tensor] = []
    steps: list[list[int]] = []
    lags = []
    while True:
        search.choose(scores_of(table, search, range(sentences)), is_stopped)
        if search.done:
            break
        found.append(told.advance(front.of_beam_search(search, told.length, only_falls=True)))
        steps.append(torch.cat(found)[:, 0].tolist())
        live = search.live
        lags.append(search.length - told.length)
        ended = live.finished_tokens[0][live.is_finished[0]].tolist()
        if sentences == 1:  # at least what all hypotheses begin with, whether they can win or not
            assert told.length >= common([*live.tokens[0, :, : search.length].tolist(), *ended])
    result = search.result()
    count = int((result.rows[:, 0] >= 0).sum(1).max())
    best = result.tokens[:, 0, 1 : 1 + count]
    found.append(told.finish(best))
    return Streamed(steps, torch.cat(found), best, lags)


@pytest.mark.parametrize("kind", ["plain", "static"])
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_transformers_rules_decide(kind: str, early: bool | str, penalty: float) -> None:
    policy = FinishingPolicy(penalty, early, LENGTH, prompt_length=1)
    lags: list[int] = []
    for seed, beams, ends in itertools.product(range(5), (2, 4), ENDS):
        for sentences in (1, 3):
            streamed = of_transformers(kind, seed, sentences, beams, policy, ends)
            assert_streamed(streamed)
            lags += streamed.lags
    assert sum(lag <= 4 for lag in lags) > len(lags) / 4, "next to nothing is told before the end"


def of_fairseq(seed: int, beams: int, penalty: float, is_normalised: bool) -> Streamed:
    policy = CollectingPolicy(penalty, is_normalised, LENGTH)
    search = FairseqBeamSearch(1, beams, policy, start=0, end=1, pad=8, device=CPU)
    table, told = drawn_table(seed, 9), DecidedFront(1)
    found: list[Tensor] = []
    steps: list[list[int]] = []
    lags = []
    while True:
        scores = scores_of(table, search, range(1))
        if search.step == LENGTH:
            scores = torch.where(torch.arange(9) == 1, scores, -torch.inf)
        search.choose(scores)
        if search.done:
            break
        found.append(told.advance(front.of_fairseq_beam_search(search, told.length, only_falls=True)))
        steps.append(torch.cat(found)[:, 0].tolist())
        lags.append(search.step + 1 - told.length)
    best = search.result()[0][0]["tokens"][None]
    found.append(told.finish(best))
    return Streamed(steps, torch.cat(found), best, lags)


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_fairseqs_rules_decide(penalty: float, is_normalised: bool) -> None:
    lags: list[int] = []
    for seed, beams in itertools.product(range(20), (1, 2, 4)):
        streamed = of_fairseq(seed, beams, penalty, is_normalised)
        assert_streamed(streamed)
        lags += streamed.lags
    assert sum(lag <= 4 for lag in lags) > len(lags) / 4, "next to nothing is told before the end"


def without_a_beam(contenders: Contenders) -> Contenders:
    """The same, but for the last live beam, which is forgotten."""
    may_win = contenders.may_win.clone()
    live = (~contenders.has_ended).sum(1) - 1
    may_win[torch.arange(len(live)), live] = False
    return dataclasses.replace(contenders, may_win=may_win)


def without_finished(contenders: Contenders) -> Contenders:
    """The same, but for the finished hypotheses, as if live beams alone counted."""
    may_win = contenders.may_win & ~contenders.has_ended
    return dataclasses.replace(
        contenders, may_win=torch.where(may_win.any(1, keepdim=True), may_win, contenders.may_win)
    )


@pytest.mark.parametrize("corrupted", [without_a_beam, without_finished])
def test_a_corrupted_front_is_found(corrupted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("of_beam_search", "of_fairseq_beam_search"):
        true = getattr(front, name)
        monkeypatch.setattr(
            front, name, functools.partial(lambda true, *args, **kw: corrupted(true(*args, **kw)), true)
        )
    with pytest.raises((ValueError, AssertionError)):
        test_what_transformers_rules_decide("plain", False, 1.0)
    with pytest.raises((ValueError, AssertionError)):
        test_what_fairseqs_rules_decide(1.0, True)


def contenders_of(tokens: list[list[int]], lengths: list[int], may_win: list[bool], ended: list[bool]) -> Contenders:
    return Contenders(torch.tensor([tokens]), torch.tensor([lengths]), torch.tensor([may_win]), torch.tensor([ended]))


def test_shared_tokens() -> None:
    live = [[5, 6, 7], [5, 6, 8], [5, 9, 9]]
    shared = functools.partial(contenders_of, live, [3, 3, 3], ended=[False] * 3)
    assert shared([True, True, True]).shared()[0].tolist() == [1]
    assert shared([True, True, False]).shared()[0].tolist() == [2]
    assert shared([False, True, False]).shared()[0].tolist() == [3]
    assert shared([False, False, False]).shared()[0].tolist() == [0]


def test_a_shorter_hypothesis_ends_what_is_shared() -> None:
    """Behind its end stands 0, which a live beam may have for a token."""
    tokens, ended = [[5, 0, 0], [5, 0, 0]], [False, True]
    assert contenders_of(tokens, [3, 1], [True, True], ended).shared()[0].tolist() == [1]
    known = contenders_of(tokens, [3, 1], [False, True], ended)
    assert [each.tolist() for each in known.shared()] == [[1], [[5, 0, 0]], [True]]
    assert DecidedFront(1).advance(known).tolist() == [[5]]


def test_padding_follows_a_known_winner_while_other_sentences_go_on() -> None:
    both = Contenders(
        tokens=torch.tensor([[[5, 0, 0], [5, 0, 0]], [[6, 7, 8], [6, 7, 9]]]),
        lengths=torch.tensor([[3, 1], [3, 3]]),
        may_win=torch.tensor([[False, True], [True, True]]),
        has_ended=torch.tensor([[False, True], [False, False]]),
    )
    assert DecidedFront(1).advance(both).tolist() == [[5, 6], [0, 7]]


def test_a_beam_that_can_no_longer_win_does_not_count() -> None:
    """One has finished with -0.5; at most -4 / 3 may come of what runs, if log-probabilities are at most 0."""
    table = {0: [-9.0, -3.0, -0.2, -3.9], 2: [-9.0, -0.1, -4.0, -6.0], 3: [-9.0, -6.0, -0.4, -5.0]}
    policy = FinishingPolicy(1.0, False, 4, prompt_length=1)
    counts = {}
    for only_falls in (True, False):
        search = beam_search("plain", 1, 2, policy)
        for _ in range(2):
            search.choose(scores_of(lambda sentence, tokens: table[tokens[-1]], search, [0]), stops((1,), 4))
        assert not search.done
        counts[only_falls] = front.of_beam_search(search, 1, only_falls).shared()[0].tolist()
    assert counts == {True: [2], False: [0]}, "0 2 1 is known to be the best"


def test_a_beam_without_a_chance_does_not_count() -> None:
    """A beam with a score of -inf, as where fewer tokens than beams are allowed, wins nothing."""
    table = {0: [-9.0, -float("inf"), -0.2, -float("inf")], 2: [-9.0, -0.1, -4.0, -6.0], 3: [-9.0, -6.0, -0.4, -5.0]}
    search = beam_search("plain", 1, 2, FinishingPolicy(1.0, False, 4, prompt_length=1))
    for _ in range(2):
        search.choose(scores_of(lambda sentence, tokens: table[tokens[-1]], search, [0]), stops((1,), 4))
    search.live.scores[0, 1] = -float("inf")
    sums = torch.tensor([-float("inf"), -1.0, 0.0])
    assert front._bound(sums, 2.0, 3).tolist()[0] == -float("inf")
    assert front.of_beam_search(search, 1, True).may_win[0, 1].item() is False


def test_a_search_that_dies_says_so() -> None:
    told = DecidedFront(1)
    told.advance(contenders_of([[5, 6]], [2], [True], [False]))
    with pytest.raises(ValueError, match="every next token was forbidden"):
        told.finish(torch.tensor([[7, 8]]))
