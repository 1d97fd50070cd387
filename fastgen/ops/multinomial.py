"""Samples one token for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops.operator import define


def multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token of each row, drawn by its probability: `torch.multinomial(probabilities, 1)[:, 0]`, faster.

    On the CPU torch draws a number of the exponential distribution for every token, one after the other. Here tokens
    of probability 0 get no number, and the generator advances as if they had: samples, now and later, equal torch's. As
    far as is known all builds of torch draw in this way: compare both once to be sure.

    Args:
        probabilities: float32 `[rows, V]`, 0 or more; they need not add up to 1.
        generator: of the same device; torch's default one otherwise.

    Returns: int64 `[rows]`.

    Raises:
        ValueError: for shapes other than these.
        TypeError: for other dtypes.
        RuntimeError: with torch's message, for numbers that are no probabilities, and rows of zeros.
    """
    tokens: Tensor = _multinomial(probabilities, generator)
    return tokens


def check_probabilities(probabilities: Tensor) -> None:
    if probabilities.dim() != 2:
        raise ValueError(f"probabilities must be [rows, vocabulary], not of shape {list(probabilities.shape)}.")
    if probabilities.dtype != torch.float32:
        raise TypeError(f"probabilities must be float32, not {probabilities.dtype}.")


def reference_multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    check_probabilities(probabilities)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def fake_multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    check_probabilities(probabilities)
    return probabilities.new_empty(probabilities.shape[0], dtype=torch.int64)


_multinomial = define(
    "multinomial",
    "(Tensor probabilities, Generator? generator=None) -> Tensor",
    reference_multinomial,
    fake_multinomial,
    is_seeded=True,
)
