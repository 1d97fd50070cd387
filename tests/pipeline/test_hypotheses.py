"""The hypotheses of each record: tokens without the padding behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fastgen.pipeline.transformers.hypotheses import Hypotheses, hypotheses_of  # noqa: E402


def _model(is_encoder_decoder: bool) -> Any:
    return SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder))


def test_the_start_token_of_a_decoder_stays_where_it_is_the_padding_too() -> None:
    config = SimpleNamespace(num_return_sequences=2, pad_token_id=3, eos_token_id=None)
    found = hypotheses_of(_model(True), config, torch.tensor([[3, 3, 3], [3, 7, 3]]), 5)
    assert found == [Hypotheses([[3], [3, 7]], [None, None])]


def test_of_a_decoder_alone_nothing_is_left_of_padding() -> None:
    config = SimpleNamespace(num_return_sequences=1, pad_token_id=3, eos_token_id=2)
    found = hypotheses_of(_model(False), config, torch.tensor([[3, 9, 3, 3], [9, 9, 7, 3]]), 2)
    assert found == [Hypotheses([[]], [None]), Hypotheses([[7]], [None])]


@pytest.mark.parametrize("ends", (2, [5, 2]))
def test_nothing_follows_the_end_token(ends: Any) -> None:
    """The host's beam search fills up with end tokens where padding is token 0; BART's decoder begins with one."""
    config = SimpleNamespace(num_return_sequences=2, pad_token_id=0, eos_token_id=ends)
    found = hypotheses_of(_model(True), config, torch.tensor([[2, 7, 2, 2, 2], [2, 7, 8, 0, 9]]), 5)
    assert found == [Hypotheses([[2, 7, 2], [2, 7, 8, 0, 9]], [None, None])]
