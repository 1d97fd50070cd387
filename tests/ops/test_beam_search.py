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


def test_log_probabilities_of_banned_tokens_count_for_nothing(operators: Any) -> None:
    """Where fewer than k tokens are left, what fills up is -inf, and not as likely as the token was."""
    log_probs, scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0]]), torch.zeros(1, 1)
    best, tokens, _, is_clear = operators.beam_candidates(log_probs, scores, 3, torch.tensor([2, 3, 4]), True)
    assert best.tolist() == [[-1.0, -2.0, -math.inf]] and tokens[0, :2].tolist() == [0, 1]
    assert is_clear.tolist() == [0]


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
    number = torch.randint(0, beams + 1, (batch, 1), generator=generator)
    taken = torch.arange(beams).expand(batch, -1) < number
    finished = torch.rand(batch, beams, generator=generator).mul(-3).sort(dim=1, descending=True)[0]

    def tokens() -> Tensor:
        return torch.randint(0, 50, (batch, beams, longest), generator=generator)

    def rows() -> Tensor:
        return torch.randint(-1, 9, (batch, beams, longest - prompt_length), generator=generator, dtype=torch.int32)

    return dict(
        tokens=tokens(),
        rows=rows(),
        scores=torch.rand(batch, beams, generator=generator).mul(-9).sort(dim=1, descending=True)[0],
        finished_tokens=tokens(),
        finished_rows=rows(),
        finished_scores=finished.where(taken, torch.tensor(-1.0e9)),
        is_finished=taken.clone(),
        improvable=torch.rand(batch, 1, generator=generator) < 0.8,
        sentence=torch.randperm(batch + 3, generator=generator)[:batch],
        candidate_scores=torch.rand(batch, count, generator=generator).mul(-9).sort(dim=1, descending=True)[0],
        candidate_tokens=torch.randint(0, 50, (batch, count), generator=generator),
        candidate_parents=torch.randint(0, beams, (batch, count), generator=generator),
        stopped=torch.rand(batch, count, generator=generator) < 0.2,
        length=length,
        prompt_length=prompt_length,
        divisor=float(length - prompt_length + 1),
        best_divisor=float(length - prompt_length + 1),
        early_stopping=source.random() < 0.5,
    )


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def advanced(operators: Any, arguments: Arguments) -> list[Any]:
    """What it returns, and what it leaves."""
    mine = copied(arguments)
    returned = operators.advance_beams_(*mine.values())
    return [*returned, *mine.values()]


@pytest.mark.parametrize("seed", range(60))
def test_both_implementations_advance_alike(native: Any, seed: int) -> None:
    source = random.Random(seed)
    arguments = drawn(source, source.choice([1, 2, 7, 40]), source.choice([1, 2, 5]))
    if source.random() < 0.4:  # what is left to torch
        row = source.randrange(len(arguments["scores"]))
        kind = source.choice(["tie", "stop", "nan", "parent", "above", "finished"])
        if kind == "tie":
            arguments["candidate_scores"][row, 1] = arguments["candidate_scores"][row, 0]
        elif kind == "stop":
            arguments["stopped"][row] = True
        elif kind == "nan":
            arguments["candidate_scores"][row, -1] = math.nan
        elif kind == "parent":
            arguments["candidate_parents"][row, 0] = arguments["scores"].shape[1]
        elif kind == "above":
            arguments["candidate_scores"][row, 0] = 1.0
        else:
            arguments["finished_scores"][row] = -1.0
    for mine, its in zip(advanced(native, arguments), advanced(reference, arguments), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def test_all_or_nothing(operators: Any) -> None:
    """Of 40 sentences one has a tie: no sentence is changed."""
    arguments = drawn(random.Random(1), 40, 3)
    arguments["stopped"][:, -3:] = False
    parents, state, *after = advanced(operators, arguments)
    assert state[0] == 1 and not all(
        torch.equal(mine, its) for mine, its in zip(after[:8], list(arguments.values())[:8], strict=True)
    )
    arguments["candidate_scores"][33, 2] = arguments["candidate_scores"][33, 1]
    parents, state, *after = advanced(operators, arguments)
    assert state.tolist() == [0, 0, 0, 0] and not parents.any()
    for mine, its in zip(after, arguments.values(), strict=True):
        assert torch.equal(mine, its) if isinstance(mine, Tensor) else mine == its


def test_one_step_by_hand(operators: Any) -> None:
    """Of two beams' candidates the first and the third end; the third is beyond the best two and counts for nothing."""
    arguments: Arguments = dict(
        tokens=torch.tensor([[[7, 1, 0, 0], [7, 2, 0, 0]]]),
        rows=torch.tensor([[[6, -1, -1], [7, -1, -1]]], dtype=torch.int32),
        scores=torch.tensor([[-1.0, -2.0]]),
        finished_tokens=torch.zeros(1, 2, 4, dtype=torch.int64),
        finished_rows=torch.full((1, 2, 3), -1, dtype=torch.int32),
        finished_scores=torch.full((1, 2), -1.0e9),
        is_finished=torch.zeros(1, 2, dtype=torch.bool),
        improvable=torch.ones(1, 1, dtype=torch.bool),
        sentence=torch.tensor([3]),
        candidate_scores=torch.tensor([[-1.5, -2.5, -2.75, -3.0]]),
        candidate_tokens=torch.tensor([[9, 4, 9, 5]]),
        candidate_parents=torch.tensor([[1, 0, 0, 1]]),
        stopped=torch.tensor([[True, False, True, False]]),
        length=2,
        prompt_length=1,
        divisor=2.0,
        best_divisor=2.0,
        early_stopping=False,
    )
    parents, state, tokens, rows, scores, ended, ended_rows, ended_scores, flags, improvable, *_ = advanced(
        operators, arguments
    )
    assert parents.tolist() == [0, 1] and state.tolist() == [1, 1, 0, 1]
    assert tokens.tolist() == [[[7, 1, 4, 0], [7, 2, 5, 0]]] and scores.tolist() == [[-2.5, -3.0]]
    assert rows.tolist() == [[[6, 6, -1], [7, 7, -1]]]
    assert ended[0, 0].tolist() == [7, 2, 9, 0] and ended_rows[0, 0].tolist() == [7, 7, -1]
    assert ended_scores.tolist() == [[-0.75, -1.0e9]] and flags.tolist() == [[True, False]]
    assert improvable.tolist() == [[True]]


def test_bad_arguments_of_advancing(operators: Any) -> None:
    good = drawn(random.Random(5), 2, 3)
    for name, value, error, sentence in (
        ("rows", good["rows"].long(), TypeError, "rows has another dtype: .*64|rows has another dtype: long"),
        ("scores", good["scores"][0], ValueError, r"scores \[batch, beams\], not of shapes"),
        ("stopped", good["stopped"][:, :2], ValueError, "stopped must be"),
        ("candidate_scores", good["candidate_scores"][:, :2], ValueError, "candidates must be 3 or more, not 2"),
        ("length", 9, ValueError, "length must be 2 to 8, not 9"),
        ("finished_tokens", good["tokens"].transpose(0, 1), ValueError, "finished_tokens must be"),
        ("tokens", good["tokens"].mT.contiguous().mT, ValueError, "tokens must be contiguous"),
    ):
        with pytest.raises(error, match=sentence):
            operators.advance_beams_(*{**copied(good), name: value}.values())


def test_a_beam_whose_score_is_nan(operators: Any) -> None:
    """torch.topk ranks it first, wherever it stands: that is not to be said to be clear."""
    logits, scores = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 6)
    for beam in range(6):
        broken = torch.tensor([[-0.5, -0.7, -0.3, -0.3, -2.0, 0.05]]).index_fill_(1, torch.tensor([beam]), torch.nan)
        assert not bool(operators.beam_candidates(logits, broken, 3)[3])
    assert bool(operators.beam_candidates(logits, scores, 3)[3])
