"""The operators between two steps of a beam search: against brute force, and one implementation against the other."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from references import reference
from torch import Tensor

Arguments = dict[str, Any]


def brute_force(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    (batch, beams), vocabulary = scores.shape, log_probs.shape[1]
    totals = (log_probs.view(batch, beams, vocabulary) + scores[:, :, None]).flatten(1)
    best, places = totals.sort(dim=1, descending=True, stable=True)
    clear = bool((best[:, :k] > best[:, 1 : k + 1]).all())
    return best[:, :k], places[:, :k] % vocabulary, places[:, :k] // vocabulary, clear


@pytest.mark.parametrize("are_log_probs", [False, True])
@pytest.mark.parametrize("banned", [None, [3, 0, 7]])
@pytest.mark.parametrize(
    ("batch", "beams", "vocabulary", "k"),
    [(1, 1, 9, 2), (3, 2, 11, 4), (64, 5, 117, 10), (2, 4, 32_000, 8), (1, 3, 70_000, 6), (2, 100, 300, 200)],
)
def test_candidates(
    operators: Any, batch: int, beams: int, vocabulary: int, k: int, banned: list[int] | None, are_log_probs: bool
) -> None:
    generator = torch.Generator().manual_seed(vocabulary + k)
    logits = torch.randn(batch * beams, vocabulary, generator=generator) * 3
    scores = torch.randn(batch, beams, generator=generator).cumsum(1).neg()
    tokens = None if banned is None else torch.tensor(banned)
    log_probs = logits.double() if are_log_probs else logits.double().log_softmax(-1)
    allowed = log_probs if tokens is None else log_probs.index_fill(1, tokens, -torch.inf)
    wide = torch.randn(batch * beams, 2, vocabulary)
    wide[:, 1] = logits
    for given in (logits, wide[:, 1]):
        *found, is_clear = operators.beam_candidates(given, scores, k, tokens, are_log_probs)
        best, expected_tokens, parents, clear = brute_force(allowed, scores.double(), k)
        assert clear and is_clear.tolist() == [1]
        torch.testing.assert_close(found[0], best.float(), rtol=1e-5, atol=1e-4)
        assert found[1].equal(expected_tokens) and found[2].equal(parents)


def test_what_leaves_the_order_to_torch(operators: Any) -> None:
    """Equal sums among the candidates or just behind them, and what is not finite, in one sentence of many."""
    logits, scores = torch.randn(12, 40), torch.zeros(4, 3)
    scores[:, 1:] = -5.0

    def is_clear(row: int, *values: float) -> bool:
        changed = logits.clone()
        changed[row, : len(values)] = torch.tensor(values)
        return bool(operators.beam_candidates(changed, scores, 4)[3])

    assert is_clear(0) and is_clear(5, 9.0, 8.0, 7.0, 6.0, 5.0)
    assert not is_clear(3, 9.0, 9.0)
    assert not is_clear(9, 9.0, 8.0, 7.0, 6.0, 6.0)
    assert is_clear(9, 9.0, 8.0, 7.0, 6.0, 5.5, 5.0, 5.0)
    assert not is_clear(7, math.nan) and not is_clear(7, math.inf)
    assert is_clear(7, -math.inf)


def test_bad_arguments_of_candidates(operators: Any) -> None:
    logits, scores = torch.zeros(6, 9), torch.zeros(2, 3)
    for arguments, error, sentence in (
        ((logits.double(), scores, 4), TypeError, "logits must be float32"),
        ((logits, scores.double(), 4), TypeError, "scores must be float32, not"),
        ((logits, scores[:1], 4), ValueError, r"scores must be \[batch, beams\], 6 in all, not of shape \[1, 3\]"),
        ((logits, scores, 9), ValueError, "k must be 1 to 8, not 9"),
        ((logits, scores, 0), ValueError, "k must be 1 to 8, not 0"),
    ):
        with pytest.raises(error, match=sentence):
            operators.beam_candidates(*arguments)


def drawn(source: random.Random, batch: int, beams: int, prompt_length: int = 2, longest: int = 9) -> Arguments:
    """A state in the middle of a search."""
    generator = torch.Generator().manual_seed(source.randrange(10**6))
    count, length = beams * source.choice([2, 3]), source.randrange(prompt_length, longest)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(0, 50, shape, generator=generator)

    def rows() -> Tensor:
        shape = batch, beams, longest - prompt_length
        return torch.randint(-1, 9, shape, generator=generator, dtype=torch.int32)

    def some(end: int) -> Tensor:
        return torch.rand(batch, end, generator=generator).argsort(1)[:, :beams].contiguous()

    places = some(beams + count)
    places[torch.rand(batch, generator=generator) < 0.4] = torch.arange(beams)  # nothing is new
    return dict(
        tokens=tokens(batch, beams, longest),
        rows=rows(),
        finished_tokens=tokens(batch, beams, longest),
        finished_rows=rows(),
        sentence=torch.randperm(batch + 3, generator=generator)[:batch],
        candidate_tokens=tokens(batch, count),
        candidate_parents=torch.randint(0, beams, (batch, count), generator=generator),
        going_on=some(count),
        places=places,
        length=length,
        prompt_length=prompt_length,
    )


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def advanced(operators: Any, arguments: Arguments) -> list[Any]:
    """What it returns, and what it leaves."""
    mine = copied(arguments)
    return [operators.advance_beams_(*mine.values()), *mine.values()]


@pytest.mark.parametrize("seed", range(40))
def test_both_implementations_advance_alike(native: Any, seed: int) -> None:
    source = random.Random(seed)
    arguments = drawn(source, source.choice([0, 1, 2, 7, 400]), source.choice([1, 2, 5, 40]))
    for mine, its in zip(advanced(native, arguments), advanced(reference, arguments), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_one_step_by_hand(operators: Any) -> None:
    """The first candidate ends and takes the first place; the second and the last go on."""
    arguments: Arguments = dict(
        tokens=torch.tensor([[[7, 1, 0, 0], [7, 2, 0, 0]]]),
        rows=torch.tensor([[[6, -1, -1], [7, -1, -1]]], dtype=torch.int32),
        finished_tokens=torch.tensor([[[7, 8, 9, 0], [0, 0, 0, 0]]]),
        finished_rows=torch.tensor([[[6, 6, -1], [-1, -1, -1]]], dtype=torch.int32),
        sentence=torch.tensor([3]),
        candidate_tokens=torch.tensor([[9, 4, 9, 5]]),
        candidate_parents=torch.tensor([[1, 0, 0, 1]]),
        going_on=torch.tensor([[1, 3]]),
        places=torch.tensor([[2, 0]]),
        length=2,
        prompt_length=1,
    )
    parents, tokens, rows, ended, ended_rows, *_ = advanced(operators, arguments)
    assert parents.tolist() == [0, 1]
    assert tokens.tolist() == [[[7, 1, 4, 0], [7, 2, 5, 0]]] and rows.tolist() == [[[6, 6, -1], [7, 7, -1]]]
    assert ended.tolist() == [[[7, 2, 9, 0], [7, 8, 9, 0]]] and ended_rows.tolist() == [[[7, 7, -1], [6, 6, -1]]]


def test_bad_arguments_of_advancing(operators: Any, native: Any) -> None:
    good = drawn(random.Random(5), 2, 3)
    for name, value, error, sentence in (
        ("rows", good["rows"].long(), TypeError, "rows has another dtype"),
        ("tokens", good["tokens"][0], ValueError, r"tokens must be \[batch, beams, length\]"),
        ("places", good["places"][:, :2], ValueError, "places must be"),
        ("length", 9, ValueError, "length must be 2 to 8, not 9"),
        ("finished_tokens", good["tokens"].transpose(0, 1), ValueError, "finished_tokens must be"),
        ("tokens", good["tokens"].mT.contiguous().mT, ValueError, "tokens must be contiguous"),
    ):
        with pytest.raises(error, match=sentence):
            operators.advance_beams_(*{**copied(good), name: value}.values())
    count = good["candidate_tokens"].shape[1]
    for name, number in (("candidate_parents", 3), ("going_on", count), ("places", 3 + count), ("places", -1)):
        changed = copied(good)
        changed[name][1, 0] = number
        with pytest.raises(IndexError, match=f"{name} must be 0 to .*, not {number}"):
            native.advance_beams_(*changed.values())
