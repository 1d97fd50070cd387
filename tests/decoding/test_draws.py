"""By how little torch decides a draw: the noise that it will draw is known, so a tie can be made."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="draws are torch's")

from fastgen.optimizer import draws  # noqa: E402
from fastgen.optimizer.verification import GAP  # noqa: E402

ROWS, WORDS, SEED = 3, 50, 11


def tied() -> torch.Tensor:
    """Weights whose ratios to the noise of SEED are the same in the first row, and nowhere else."""
    torch.manual_seed(SEED)
    weights = torch.rand(ROWS, WORDS)
    torch.manual_seed(SEED)
    weights[0] = torch.empty(ROWS, WORDS).exponential_()[0]
    return weights


@pytest.mark.parametrize("replacement", [False, True])
def test_gaps_of_one_draw(replacement: bool) -> None:
    weights, seen = tied(), []
    torch.manual_seed(SEED)
    expected = torch.multinomial(weights, 1, replacement=replacement)
    stream = torch.get_rng_state()
    torch.manual_seed(SEED)
    with draws.watched(seen.append):
        drawn = torch.multinomial(weights, 1, replacement=replacement)
    assert torch.equal(drawn, expected) and torch.equal(torch.get_rng_state(), stream), "watching changes nothing"
    (gaps,) = seen
    assert gaps[0] < GAP and (gaps[1:] > GAP).all()


def test_several_draws_and_ranks() -> None:
    torch.manual_seed(SEED)
    weights, seen = torch.rand(ROWS, WORDS), []
    weights[1] = 0.5  # whichever are drawn, their ranks are a tie
    with draws.watched(seen.append):
        torch.multinomial(weights, 4)
        torch.multinomial(weights, 4, replacement=True)  # by another method, of which nothing is known
    assert seen[0][1] == 0 and seen[0][0] > 0 and seen[1].isinf().all()


def test_other_threads_are_not_watched() -> None:
    seen: list[torch.Tensor] = []
    with draws.watched(seen.append):
        other = threading.Thread(target=lambda: torch.multinomial(torch.ones(2, 3), 1))
        other.start()
        other.join()
    assert not seen
    torch.multinomial(torch.ones(2, 3), 1)
    assert not seen
