"""multinomial draws what torch.multinomial draws, and leaves the generator where that leaves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen import ops


def probabilities(rows: int, vocabulary: int, part: float, seed: int = 0) -> torch.Tensor:
    """`part` of the tokens, at least one of each row, may be drawn."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(rows, vocabulary, generator=generator)
    found[torch.rand(rows, vocabulary, generator=generator) >= part] = 0
    found[torch.arange(rows), torch.randint(vocabulary, (rows,), generator=generator)] = 0.5
    return found


@pytest.mark.parametrize("part", [0.0, 0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (1, 5), (3, 31), (4, 312), (2, 625), (5, 4001), (32, 32000)])
def test_draws_as_torch(native: Any, rows: int, vocabulary: int, part: float) -> None:
    given = probabilities(rows, vocabulary, part)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    for _ in range(3):
        expected = torch.multinomial(given, 1, generator=theirs).squeeze(1)
        assert torch.equal(ops.multinomial(given, generator=ours), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.equal(torch.randn(9, generator=ours), torch.randn(9, generator=theirs))


def test_the_default_generator(native: Any) -> None:
    given = probabilities(4, 1000, 0.1).mT.contiguous().mT  # rows that lie anywhere
    found = []
    for draw in (ops.multinomial, lambda given: torch.multinomial(given, 1).squeeze(1)):
        torch.manual_seed(3)
        found.append((draw(given), torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wrong", [-0.1, float("inf"), float("nan")])
def test_what_torch_refuses(native: Any, wrong: float) -> None:
    given = probabilities(3, 50, 0.5)
    given[1, 7] = wrong
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
        ops.multinomial(given)
    given[1] = 0
    with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
        ops.multinomial(given)
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    with pytest.raises(RuntimeError):
        ops.multinomial(given, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"probabilities must be \[rows, vocabulary\], not of shape \[3\]"):
        ops.multinomial(torch.ones(3))
    with pytest.raises(TypeError, match=r"probabilities must be float32, not "):
        ops.multinomial(torch.ones(3, 3, dtype=torch.float64))
    assert ops.multinomial(torch.empty(0, 5)).shape == (0,)


def test_a_tiny_probability_alone(native: Any) -> None:
    """Its quotient with a large number may be 0: torch then takes the first token."""
    given = torch.zeros(200, 3)
    given[:, 2] = 1e-45
    ours, theirs = (torch.Generator().manual_seed(2) for _ in range(2))
    assert torch.equal(ops.multinomial(given, generator=ours), torch.multinomial(given, 1, generator=theirs).squeeze(1))
