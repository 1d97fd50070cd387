"""Diverse beam search: groups that avoid what those before them chose, and what each of them has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="the searches need torch")

import torch
from plain_search import AFTER, AT_ONCE, Hypothesis, Table, after, assert_found, continued, drawn_table, scores_of
from torch import Tensor

from fastgen.decoding.diverse_beam_search import DiversePolicy, DiverseSearch

PAD = 0


def search_of(
    sentences: int, beams: int, groups: int, early: bool | str, penalty: float, length: int, ends: tuple[int, ...]
) -> DiverseSearch:
    policy = DiversePolicy(groups, penalty, early, length, prompt_length=1, ends=ends, pad=PAD)
    return DiverseSearch(torch.zeros(sentences * beams, 1, dtype=torch.int64), beams, policy)


def hamming(search: DiverseSearch, penalty: float) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Takes off the penalty for each beam of an earlier group, of the same sentence, that chose the token."""

    def process(group: int, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        earlier, later = chosen.unflatten(0, (-1, search.beams)).tensor_split([group * search.size], dim=1)
        assert not later.any()
        counts = [torch.bincount(row, minlength=scores.shape[1]) for row in earlier]
        return scores - penalty * torch.stack(counts).repeat_interleave(search.size, dim=0)

    return process


def run(search: DiverseSearch, table: Table, penalty: float) -> None:
    while not search.done and search.running().shape[1] < search.policy.max_length:
        before = search.running()
        parents = search.choose(scores_of(table, search, range(2)), hamming(search, penalty))
        assert torch.equal(search.running()[:, :-1], before[parents])


@pytest.mark.parametrize(("penalty", "token", "score"), [(0.75, 2, -1.75), (1.5, 3, -2.0), (30.0, 3, -2.0)])
def test_the_second_group_avoids_the_firsts_token(penalty: float, token: int, score: float) -> None:
    """Token 2 has -1 and token 3 has -2; a penalty that is paid stays in the score."""
    search = search_of(2, 2, groups=2, early=False, penalty=1.0, length=2, ends=(1,))
    run(search, after, penalty)
    expected = [[Hypothesis(-1.0, (0, 2), (row,)), Hypothesis(score, (0, token), (row + 1,))] for row in (0, 2)]
    assert_found(search.result(2), expected)


def test_a_group_that_is_done_pads_and_the_other_goes_on() -> None:
    search = search_of(1, 2, groups=2, early=True, penalty=1.0, length=6, ends=(1,))
    process = hamming(search, 5.0)
    search.choose(torch.tensor([[-9.0, -0.5, -1.0, -2.0, -8.0], AFTER[0]]), process)
    assert search.running().tolist() == [[0, 2], [0, 3]]  # the first group has put the end aside
    assert search.choose(torch.tensor([AFTER[2], AFTER[3]]), process).tolist() == [0, 1]
    assert search.running().tolist() == [[0, 2, PAD], [0, 3, 2]] and not search.done
    search.choose(torch.tensor([AT_ONCE, AFTER[2]]), process)
    assert search.done
    expected = [Hypothesis(-0.5, (0, 1), (0,)), Hypothesis(-2.9 / 3, (0, 3, 2, 1), (1, 1, 1))]
    assert_found(search.result(2), [expected])
    assert_found(search.result(1), [expected[:1]])


# ---------------------------------------------------------------------------------------------- the rules, on lists
def penalised(table: Table, penalty: float, taken: Sequence[int]) -> Table:
    costs = [penalty * taken.count(token) for token in range(9)]
    return lambda sentence, tokens: [x - cost for x, cost in zip(table(sentence, tokens), costs, strict=True)]


def searched(table: Table, sentence: int, beams: int, policy: DiversePolicy, penalty: float) -> tuple[list, bool]:
    """What a sentence's groups find, the best first, and whether all of them are done."""
    size, exponent, ends = beams // policy.groups, policy.length_penalty, policy.ends
    groups = range(policy.groups)
    running, ended = [[Hypothesis(0.0, (0,))] for _ in groups], [list[Hypothesis]() for _ in groups]
    done = [False for _ in groups]
    for length in range(2, policy.max_length + 1):
        taken: list[int] = []
        for group in groups:
            if done[group]:
                taken += [PAD] * size
                continue
            now = penalised(table, penalty, taken)
            found = continued(now, sentence, running[group], sentence * beams + group * size)
            found = found[: max(2, 1 + len(ends)) * size]
            running[group] = [each for each in found if each.tokens[-1] not in ends][:size]
            taken += [each.tokens[-1] for each in running[group]]
            for score, tokens, rows in found[:size]:
                if tokens[-1] in ends:
                    ended[group].append(Hypothesis(score / (length - 1) ** exponent, (*tokens[:-1], ends[0]), rows))
            ended[group] = sorted(ended[group], reverse=True)[:size]
            if len(ended[group]) == size:
                by_maximum = policy.early_stopping == "never" and exponent > 0
                attainable = found[0].score / ((policy.max_length if by_maximum else length) - 1) ** exponent
                done[group] = policy.early_stopping is True or ended[group][-1].score >= attainable
    for group in groups:
        if not done[group]:
            ended[group] += [x._replace(score=x.score / (policy.max_length - 1) ** exponent) for x in running[group]]
    return sorted([each for found in ended for each in sorted(found, reverse=True)[:size]], reverse=True), all(done)


@pytest.mark.parametrize("exponent", [1.0, 0.0, -0.7])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize(("beams", "groups", "ends"), [(2, 2, (1,)), (4, 2, (1,)), (3, 1, (1, 5)), (6, 3, (1, 5))])
def test_as_on_lists(beams: int, groups: int, ends: tuple[int, ...], early: bool | str, exponent: float) -> None:
    for seed in range(6):
        penalty, table = 0.3 if seed < 3 else 1.7, drawn_table(seed, 9, ends)
        search = search_of(2, beams, groups, early, exponent, 8, ends)
        run(search, table, penalty)
        expected = [searched(table, sentence, beams, search.policy, penalty) for sentence in range(2)]
        assert search.done == all(done for _, done in expected)
        assert_found(search.result(beams), [found for found, _ in expected])
