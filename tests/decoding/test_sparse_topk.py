"""Choosing among some values what `torch.topk` chooses among all, equal values included."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding import sparse_topk
from fastgen.decoding.beam_search import BeamSearch, FinishingPolicy

END, FILL = 2, 1


def test_this_torch_keeps_a_heap() -> None:
    assert sparse_topk.may_do(3, 3 * 64, torch.device("cpu"))
    assert not sparse_topk.may_do(3, 3 * 64 - 1, torch.device("cpu"))
    assert not sparse_topk.may_do(3, 3 * 64, torch.device("meta"))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 2, 8, 100])
@pytest.mark.parametrize("n", [6400, 6401, 30_011])
def test_it_is_topk(n: int, k: int, share: float) -> None:
    """Of few different values, so that nearly all are equal to others; -inf stands among what may be chosen, too."""
    generator = torch.Generator().manual_seed(n + k)
    dense = torch.randint(-3, 2, (5, n), generator=generator).float() - 1e9 * torch.randint(
        0, 2, (5, n), generator=generator
    )
    allowed = torch.rand(dense.shape, generator=generator) < share
    allowed[:, -1] = True
    dense[torch.rand(dense.shape, generator=generator) < 0.1] = -float("inf")
    rows, places = torch.nonzero(allowed, as_tuple=True)
    expected = torch.topk(dense.masked_fill(~allowed, -float("inf")), k)
    values, found, numbers = sparse_topk.sparse_topk(dense[rows, places], rows, places, 5, k)
    assert torch.equal(values, expected.values)
    assert torch.equal(found, expected.indices)
    is_one = numbers >= 0
    assert torch.equal(places[numbers[is_one]], found[is_one])
    assert not allowed[torch.arange(5)[:, None].expand_as(found)[~is_one], found[~is_one]].any()


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("share", [0.004, 0.02, 0.4])
def test_a_search_among_some_tokens(share: float, penalty: float, early: bool | str) -> None:
    """All of its state is what the search over all tokens has, at every step, though few scores differ."""
    beams, vocabulary, batch, length = 5, 150, 3, 9
    generator = torch.Generator().manual_seed(int(share * 1000))
    policy = FinishingPolicy(penalty, early, length, 1)
    prompt = torch.zeros(batch * beams, 1, dtype=torch.int64)
    every, some = (BeamSearch(prompt, beams, 2 * beams, policy, FILL) for _ in range(2))
    assert some.may_choose_among(vocabulary)

    def is_stopped(tokens: torch.Tensor, hypotheses: object) -> torch.Tensor:
        return (tokens == END) | (every.length + 1 >= length)

    steps = 0
    while not every.done:
        scores = torch.randint(-6, 0, (batch * beams, vocabulary), generator=generator).float() / 2
        allowed = torch.rand(scores.shape, generator=generator) < share
        allowed[:, END] |= torch.rand(len(scores), generator=generator) < 0.3
        allowed[~allowed.any(1), 7] = True
        rows, tokens = torch.nonzero(allowed, as_tuple=True)
        found = some.choose_among(scores[rows, tokens], rows, tokens, vocabulary, is_stopped, -torch.inf)
        # Not by the operator, which leaves equal scores to torch.
        expected = every.choose(scores.masked_fill(~allowed, -torch.inf), is_stopped, is_tied=True)
        assert found is not None and torch.equal(found, expected)
        for name, value in vars(every.live).items():
            assert torch.equal(value, getattr(some.live, name)), name
        assert some.done == every.done
        steps += 1
    assert steps > 1
    assert torch.equal(every.result().tokens, some.result().tokens)
    assert torch.equal(every.result().scores, some.result().scores)


def test_a_sum_that_is_too_low() -> None:
    search = BeamSearch(torch.zeros(2, 1, dtype=torch.int64), 2, 4, FinishingPolicy(1.0, False, 5, 1), FILL)
    rows, tokens = torch.tensor([0, 0, 1, 1]), torch.tensor([3, 4, 3, 4])
    before = search.live.tokens.clone()

    def is_stopped(tokens: torch.Tensor, hypotheses: object) -> torch.Tensor:
        return tokens == END

    assert search.choose_among(torch.full((4,), -1.0), rows, tokens, 200, is_stopped, -5e8) is None
    assert torch.equal(before, search.live.tokens) and search.length == 1
