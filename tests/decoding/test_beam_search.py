"""Beam search on tables of log-probabilities: what ends when, by which rules, and who came from whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import plain_search
import torch
from plain_search import AFTER, AT_ONCE, CPU, Hypothesis, Table, assert_found, beam_search, decode, drawn_table, stops
from torch import Tensor

from fastgen import ops
from fastgen.decoding.beam_search import FinishingPolicy

INF = math.inf
# Of AFTER two beams find these. At steps 2, 3 and 4 one ends, and at step 5, the last, both do. The score is the sum.
A = Hypothesis(-1.5, (0, 2, 1), (0, 0))
B = Hypothesis(-2.9, (0, 3, 2, 1), (0, 1, 1))
C = Hypothesis(-3.15, (0, 2, 3, 2, 1), (0, 0, 0, 0))
D = Hypothesis(-4.55, (0, 3, 2, 3, 2, 1), (0, 1, 1, 1, 1))
E = Hypothesis(-4.3, (0, 2, 3, 2, 3, 2), (0, 0, 0, 0, 0))


def policy_of(early: bool | str = False, penalty: float = 1.0, max_length: int = 6) -> FinishingPolicy:
    return FinishingPolicy(penalty, early, max_length, prompt_length=1)


@pytest.fixture
def native() -> None:
    if not ops.is_native(CPU):
        pytest.skip("no native operators")


@pytest.fixture(params=["native", "torch", "static", "device"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Candidates by the native operator or by torch, or the searches for devices: captured, or with one wait a step."""
    if request.param in ("native", "device"):
        request.getfixturevalue("native")
    else:
        monkeypatch.setattr(ops, "is_native", lambda device: False)
    kind: str = request.param
    return kind


def normalised(hypothesis: Hypothesis, penalty: float, row: int = 0) -> Hypothesis:
    """With the length-normalised score; `row`: the sentence's first."""
    score, tokens, rows = hypothesis
    return Hypothesis(score / len(rows) ** penalty, tokens, tuple(row + each for each in rows))


@pytest.mark.parametrize(
    ("early", "penalty", "expected", "length"),
    [
        (True, 1.0, (A, B), 4),  # two have ended
        (True, 0.0, (A, B), 4),
        (True, 2.0, (B, A), 4),
        (True, -1.0, (A, B), 4),
        (False, 1.0, (A, C), 5),  # -3.9 / 4, the best that runs, is worse than C's -3.15 / 4
        (False, 0.0, (A, B), 5),
        (False, 2.0, (E, D), 6),
        (False, -1.0, (A, B), 5),
        ("never", 1.0, (A, C), 6),  # but -3.9 / 5 would be better
        ("never", 0.0, (A, B), 5),
        ("never", 2.0, (E, D), 6),
        ("never", -1.0, (A, B), 5),
    ],
)
def test_what_ends_when(
    kind: str, early: bool | str, penalty: float, expected: Sequence[Hypothesis], length: int
) -> None:
    search = beam_search(kind, 2, 2, policy_of(early, penalty))
    decode(search, plain_search.after, partial(search.choose, is_stopped=stops([1], 6)))
    assert search.length == length
    assert_found(search.result(), [[normalised(each, penalty, row) for each in expected] for row in (0, 2)])


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [
        (4, [Hypothesis(-2.65 / 3, (0, 2, 3, 2), (0, 0, 0)), Hypothesis(-3.65 / 3, (0, 3, 2, 3), (0, 1, 1))]),
        (2, [Hypothesis(-1.0, (0, 2), (0,)), Hypothesis(-2.0, (0, 3), (0,))]),
    ],
)
def test_nothing_ends_before_the_maximal_length(kind: str, max_length: int, expected: list[Hypothesis]) -> None:
    """A token that is banned, of -inf, is never chosen."""

    def without_end(sentence: int, tokens: tuple[int, ...]) -> list[float]:
        return [-INF if token == 1 else score for token, score in enumerate(AFTER[tokens[-1]])]

    search = beam_search(kind, 1, 2, policy_of(max_length=max_length))
    decode(search, without_end, partial(search.choose, is_stopped=stops([1], max_length)))
    assert_found(search.result(), [expected])


@pytest.mark.parametrize("evicts", [False, True])
def test_one_of_three_ends_at_once(kind: str, evicts: bool) -> None:
    """With two tokens that end, 1 and 4, both its hypotheses end at the first step."""
    search, is_stopped, rows = beam_search(kind, 3, 2, policy_of(True), ends=[1, 4]), stops([1, 4], 6), range(6)
    parents = search.choose(torch.tensor([AFTER[0]] * 2 + [AT_ONCE] * 2 + [AFTER[0]] * 2), is_stopped)
    assert parents.tolist() == [0, 0, 2, 2, 4, 4] and not search.done
    assert search.finished_mask().tolist() == [False, True, False]
    tokens, scores = search.hypotheses(1)
    assert tokens.tolist() == [[0, 1, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0]] and scores.tolist() == [-0.5, -2.0]
    if evicts:
        assert search.evict(search.finished_mask()).tolist() == [0, 2] and search.batch == 2
        rows = range(4)
    while not search.done:
        scores = torch.tensor([AFTER.get(tokens[-1], AT_ONCE) for tokens in search.running().tolist()])
        parents = search.choose(scores, is_stopped).tolist()
        assert parents[:2] + parents[-2:] == [*rows[:2], *rows[-2:]]
    first, third = ([normalised(each, 1.0, row) for each in (A, B)] for row in (0, 4))
    assert_found(search.result(), [first, [Hypothesis(-0.5, (0, 1), (2,)), Hypothesis(-2.0, (0, 4), (2,))], third])


def test_parents_are_rows(kind: str) -> None:
    seen: list[torch.Tensor] = []

    def is_stopped(tokens: torch.Tensor, hypotheses: Callable[[], torch.Tensor]) -> torch.Tensor:
        seen.append(hypotheses().unflatten(0, tokens.shape))
        return torch.zeros_like(tokens, dtype=torch.bool)

    search = beam_search(kind, 2, 2, policy_of())
    search.choose(torch.tensor([AFTER[0]] * 4), stops([1], 6))  # every first beam has -1, and the second -2
    assert search.choose(torch.tensor(plain_search.CROSSING), is_stopped).tolist() == [1, 1, 3, 2]
    assert search.running().tolist() == [[0, 3, 2], [0, 3, 3], [0, 3, 0], [0, 2, 3]]
    assert kind == "static" or torch.equal(seen[0][:, :2].flatten(0, 1), search.running())  # of the candidates


def test_a_beam_without_candidates_is_taken_over(kind: str) -> None:
    search = beam_search(kind, 1, 2, policy_of())
    search.choose(torch.tensor([[-INF, -INF, -1.0, -INF, -INF]] * 2), stops([1], 6))
    assert search.running()[0].tolist() == [0, 2]
    assert search.choose(torch.tensor([[-9.0, -8.0, -1.0, -2.0, -7.0]] * 2), stops([1], 6)).tolist() == [0, 0]
    assert search.running().tolist() == [[0, 2, 2], [0, 2, 3]]
    assert search.live.scores.tolist() == [[-2.0, -3.0]]


@pytest.mark.parametrize("evicts", [False, True])
def test_all_candidates_stop(evicts: bool) -> None:
    """That ends the search, unless those of sentences that have left might go on."""
    search = beam_search("torch", 2, 2, policy_of())
    search.choose(torch.tensor([AFTER[0]] * 4), stops([], 6))
    if evicts:
        search.evict(torch.tensor([True, False]))
    scores = torch.tensor([[-INF, -INF, -1.0, -INF], [-INF] * 4] * search.batch)  # one candidate, where two could end
    search.choose(scores, lambda tokens, hypotheses: torch.ones_like(tokens, dtype=torch.bool))
    assert search.done != evicts


# ---------------------------------------------------------------------------------------------- the rules, on lists
def searched(table: Table, sentence: int, beams: int, ends: list[int], policy: FinishingPolicy) -> tuple[list, int]:
    """Beam search of a sentence by the rules of transformers: what has ended, the best first, and at which length."""
    running, finished, penalty = [Hypothesis(0.0, (0,))], list[Hypothesis](), policy.length_penalty
    by_maximum = policy.early_stopping == "never" and penalty > 0
    for length in range(2, policy.max_length + 1):
        found = plain_search.continued(table, sentence, running, sentence * beams)[: max(2, 1 + len(ends)) * beams]
        is_end = [length == policy.max_length or hypothesis.tokens[-1] in ends for hypothesis in found]
        finished += [normalised(found[place], penalty) for place in range(beams) if is_end[place]]
        finished = sorted(finished, reverse=True)[:beams]
        running = [hypothesis for hypothesis, ending in zip(found, is_end, strict=True) if not ending][:beams]
        if length < policy.max_length and len(finished) == beams:
            attainable = running[0].score / ((policy.max_length if by_maximum else length) - 1) ** penalty
            if policy.early_stopping is True or attainable <= finished[-1].score:
                break
    return finished, length


@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.7])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize(("vocabulary", "beams", "ends"), [(8, 3, [1]), (9, 2, [1, 5]), (4, 1, [])])
def test_as_on_lists(
    kind: str, vocabulary: int, beams: int, ends: list[int], early: bool | str, penalty: float
) -> None:
    policy = policy_of(early, penalty, max_length=9)
    for seed in range(6):
        table = drawn_table(seed, vocabulary, ends)
        expected, lengths = zip(*(searched(table, sentence, beams, ends, policy) for sentence in range(3)), strict=True)
        search, evicts = beam_search(kind, 3, beams, policy, ends), seed > 2
        left = decode(search, table, partial(search.choose, is_stopped=stops(ends, 9)), evicts)
        assert search.length == max(lengths)
        assert_found(search.result(), expected)
        if kind != "static":  # which lets them go a step late
            assert left == (sum(length < max(lengths) for length in lengths) if evicts else 0)


def test_one_operator_does_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step but the last, where all candidates stop; or none."""
    done: list[int] = []
    advance = ops.advance_beams_

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        parents, state = advance(*arguments)
        done.extend([arguments[13]] * int(state[0]))
        return parents, state

    monkeypatch.setattr(ops, "advance_beams_", noted)
    search = beam_search(kind, 3, 2, policy_of("never", 2.0, max_length=9), [1, 5])
    decode(search, drawn_table(3, 9, [1, 5]), partial(search.choose, is_stopped=stops([1, 5], 9)))
    assert search.length == 9
    assert done == ([*range(1, 8)] if kind == "native" else [])


SEEN = ("tokens", "rows", "scores", "finished_scores", "is_finished", "improvable", "sentence")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0, -2.0, -8.0])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("begins_narrow", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_operator_as_torch(seed: int, begins_narrow: bool, early: bool | str, penalty: float) -> None:
    """After each step all is equal but what places hold that none has taken, and at the end these too: with equal
    scores, with banned tokens, with steps of which nothing is left, and with sentences that leave. A search that
    `begins_narrow` has fewer tokens than beams at first, so dead beams may end."""
    generator = torch.Generator().manual_seed(seed)
    sentences, beams = [(1, 2), (3, 3), (5, 1), (4, 5), (40, 2), (6, 6)][seed]
    policy, ends = policy_of(early, penalty, max_length=14), [1, 5][: 1 + seed % 2]
    ours, by_torch = (beam_search(kind, sentences, beams, policy, ends) for kind in ("native", "torch"))
    scale, rarely = (0.5, 4.0)[seed % 2], torch.randint(2, 14, (4,), generator=generator).tolist()
    while not by_torch.done:
        log_probs = (torch.randn(ours.batch * beams, 12, generator=generator) * 2).log_softmax(-1)
        log_probs[:, ends] -= scale
        if begins_narrow and ours.length <= 1 + seed % 2:
            log_probs[:, [each for each in range(12) if each not in (1, 7)]] = -INF
        if ours.length == rarely[0]:
            log_probs = log_probs.mul(2).round().div(2)  # many are equal
        if ours.length == rarely[1]:
            log_probs[torch.rand(log_probs.shape, generator=generator) < 0.9] = -INF
        if ours.length == rarely[2] and seed == 3:
            log_probs.fill_(-1.0e10)
        is_stopped = stops(ends, 14)
        assert ours.choose(log_probs, is_stopped).equal(by_torch.choose(log_probs, is_stopped, is_tied=True))
        assert ours.length == by_torch.length and ours.done == by_torch.done
        for name in SEEN:
            assert getattr(ours.live, name).equal(getattr(by_torch.live, name)), name
        assert ours.num_finished() == by_torch.num_finished()
        if not ours.done and ours.length % 3 == 0 and 0 < ours.num_finished() < ours.batch:
            leaving = ours.finished_mask()
            assert ours.evict(leaving).equal(by_torch.evict(leaving))
    for row in range(ours.batch):
        for mine, its in zip(ours.hypotheses(row), by_torch.hypotheses(row), strict=True):
            assert mine.equal(its)
    found, expected = ours.result(), by_torch.result()
    assert found.tokens.equal(expected.tokens) and found.rows.equal(expected.rows)
    assert found.scores.equal(expected.scores)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("penalty", [-6.0, -10.0, 1.0])
def test_a_search_that_ends_with_places_left(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that sink below the mark of the dead, or a step at which nothing is left: `torch.topk` has put candidates
    that never ended in the places, and they are returned."""

    def found(is_native: bool) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(ops, "is_native", lambda device: is_native)
            search = beam_search("any", 2, 3, policy_of(False, penalty, max_length=24), [])
            generator = torch.Generator().manual_seed(3)
            while not search.done:
                log_probs = torch.randn(6, 11, generator=generator).log_softmax(-1) - 4
                if penalty == 1.0 and search.length > 4:
                    log_probs = torch.full_like(log_probs, -1.0e10)
                search.choose(log_probs, stops([], 24))
            return search.result(), search.length

    (ours, length), (by_torch, its) = found(True), found(False)
    assert length == its
    assert ours.tokens.equal(by_torch.tokens) and ours.rows.equal(by_torch.rows)
    assert ours.scores.equal(by_torch.scores)


@pytest.mark.usefixtures("native")
def test_a_dtype_that_changes_back() -> None:
    """A logits processor has made float64 of the first steps' scores."""
    search, table = beam_search("any", 2, 2, policy_of(max_length=9)), drawn_table(2, 8)
    expected = beam_search("any", 2, 2, policy_of(max_length=9))
    while not search.done:
        log_probs = plain_search.scores_of(table, search, [0, 1])
        wide = log_probs.double() if search.length < 4 else log_probs
        parents = search.choose(wide, stops([1], 9))
        assert parents.equal(expected.choose(log_probs.double(), stops([1], 9)))
    assert search.result().tokens.equal(expected.result().tokens)


# ---------------------------------------------------------------------------------------------- logits and bans
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(6))
def test_choose_allowed_as_choose(seed: int) -> None:
    table, banned, is_stopped = drawn_table(seed, 8), torch.tensor([3, 5]), stops([1], 9)
    by_logits, by_log_probs = (beam_search("any", 2, 2, policy_of("never", max_length=9)) for _ in range(2))
    assert by_logits.takes_logits
    while not by_logits.done:
        scores = plain_search.scores_of(table, by_logits, [0, 1])
        logits = scores + torch.arange(4.0)[:, None]  # which log_softmax takes away again
        parents = by_logits.choose_allowed(logits, banned, is_stopped)
        by_torch = by_log_probs.choose(scores.index_fill(1, banned, -INF), is_stopped, is_tied=True)
        assert parents is not None and torch.equal(parents, by_torch)
        assert torch.equal(by_logits.running(), by_log_probs.running())
    found, expected = by_logits.result(), by_log_probs.result()
    assert by_log_probs.done and torch.equal(found.tokens, expected.tokens) and torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.scores, expected.scores)
    assert not torch.isin(found.tokens, banned).any()


@pytest.mark.parametrize("is_native", [False, True])
def test_logits_that_need_all_log_probabilities(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no operator, and where two candidates are equal."""
    logits = torch.zeros(2, 8) if is_native else torch.arange(8.0).repeat(2, 1)
    if is_native and not ops.is_native(CPU):
        pytest.skip("no native operators")
    monkeypatch.setattr(ops, "is_native", lambda device: is_native)
    search = beam_search("any", 1, 2, policy_of())
    assert search.takes_logits == is_native
    assert search.choose_allowed(logits, torch.tensor([3]), stops([1], 6)) is None
    assert search.running().tolist() == [[0], [0]]
