"""Where tiny configurations and real inputs are registered, by the name of the model's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from zoo import FIRST_WORD, PAD, START, UNUSED  # the tokens of the other tiny models

VOCABULARY = 99
SPECIAL = dict(pad_token_id=PAD, bos_token_id=START, eos_token_id=UNUSED)
FIRST_PLACEHOLDER = 90  # tokens from here on stand for images, audio and the like: texts hold none by chance

Function = Callable[..., Any]

# Class -> a function of no arguments that returns a configuration: a hidden size of about 32, two layers or one of each
# kind, heads of 8 or 16, `initializer_range=0.3` so that the best token differs from step to step.
CONFIGURATIONS: dict[str, Function] = {}
# Class -> a function of the model that returns inputs of the class's own kind, as keyword arguments of `generate`: a
# list of batches, with what is special about each. The first is the plainest.
INPUTS: dict[str, Function] = {}


def configures(*classes: str) -> Callable[[Function], Function]:
    """Register a function as the tiny configuration of these classes."""

    def register(function: Function) -> Function:
        CONFIGURATIONS.update(dict.fromkeys(classes, function))
        return function

    return register


def feeds(*classes: str) -> Callable[[Function], Function]:
    """Register a function as the source of these classes' own inputs."""

    def register(function: Function) -> Function:
        INPUTS.update(dict.fromkeys(classes, function))
        return function

    return register


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Random numbers, float32 of this shape, in place of pixels or of features of speech."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random tokens, int64 `[rows, length]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, FIRST_PLACEHOLDER, (rows, length), generator=generator)


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Texts of different lengths as `input_ids` and `attention_mask`, int64 `[rows, longest]`, padded on the left."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
