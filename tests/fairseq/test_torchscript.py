"""Users compile generators with TorchScript: that works as on stock, with fastgen on and off."""

from __future__ import annotations

from typing import Any

import judge
import models
import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen.optimizer.fairseq import seams


def scripted(name: str, **options: Any) -> Any:
    generator = SequenceGenerator([models.load(name)], models.dictionary(), beam_size=3, max_len_b=9, **options)
    return torch.jit.script(generator)


def inputs() -> dict[str, Any]:
    net_input = models.batch()["net_input"]
    return {"net_input": {name: net_input[name] for name in ("src_tokens", "src_lengths")}}


@pytest.mark.parametrize(("name", "options"), [("post-norm", {}), ("pre-norm", dict(no_repeat_ngram_size=2))])
def test_scripted_generators(name: str, options: dict[str, Any]) -> None:
    with fastgen.disabled():
        stock = scripted(name, **options)
        expected = stock(inputs())
    while_on = scripted(name, **options)
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    fastgen.disable()
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    judge.assert_same(expected, scripted(name, **options)(inputs()), exactly=True)
    fastgen.enable()
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    judge.assert_same(expected, stock(inputs()), exactly=True)


def test_the_alias_is_a_function_of_its_own() -> None:
    stock = vars(SequenceGenerator)[seams.STOCK_GENERATE]
    assert stock.__name__ == seams.STOCK_GENERATE and stock is not seams.stock["_generate"]
    assert stock.__code__ is seams.stock["_generate"].__code__
    with fastgen.disabled():
        assert seams.STOCK_GENERATE not in vars(SequenceGenerator)
