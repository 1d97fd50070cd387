"""Top-k and top-p at once: the same scores as one after the other, and what ties decide is left to the host."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import zoo
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from fastgen.optimizer.transformers.generate import top_k_top_p
from fastgen.optimizer.transformers.generate.processors import Processing

V = 300


def both(scores: Tensor, k: int, p: float, keep: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """The host's result, `Processing`'s, and what was found at once."""
    top_k, top_p = TopKLogitsWarper(k, min_tokens_to_keep=keep), TopPLogitsWarper(p, min_tokens_to_keep=keep)
    before, tokens = scores.clone(), torch.zeros(len(scores), 1, dtype=torch.int64)
    expected = LogitsProcessorList([top_k, top_p])(tokens, scores)
    found = Processing().apply(LogitsProcessorList([top_k, top_p]), tokens, scores)
    assert torch.equal(scores, before)
    return expected, found, top_k_top_p.joined(top_k, top_p, scores)


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.75, 0.95, 0.999, 1.0])
@pytest.mark.parametrize(("k", "keep"), [(1, 1), (2, 1), (32, 1), (50, 3), (V - 1, 1)])
def test_the_same_scores(k: int, keep: int, p: float) -> None:
    scores = 4 * torch.randn(64, V, generator=torch.Generator().manual_seed(k))
    expected, found, _ = both(scores, k, p, keep)
    assert torch.equal(found, expected)
    if k > 1 and 0.05 <= p < 0.999:
        at_once = [both(row[None], k, p, keep)[2] for row in scores]
        assert sum(one is not None for one in at_once) > 56  # nearly always


def test_temperature_goes_first_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    joined = top_k_top_p.joined
    monkeypatch.setattr(top_k_top_p, "joined", lambda *given: calls.append(joined(*given)) or calls[-1])
    options = dict(num_beams=1, do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, max_new_tokens=12)
    for family in ("bart", "gpt2"):
        inputs = {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}
        details = dict(return_dict_in_generate=True, output_scores=True)
        harness.compare(zoo.load(family), inputs, **options, **details)
    assert sum(one is not None for one in calls) > 12


# ---------------------------------------------------------------------------------------------- left to the host
def row(*values: float) -> Tensor:
    return torch.tensor([[*values, *[-9.0 - place / 10 for place in range(20)]]])


@pytest.mark.parametrize(
    ("scores", "k", "p"),
    [
        pytest.param(row(3, 2, 1, 1), 3, 0.9, id="the k-th is there twice"),
        pytest.param(row(1, 1, 1, 1), 4, 0.6, id="the edge lies between equal ones"),
        pytest.param(row(0, 0), 2, 0.5, id="a sum lies on the edge"),
        pytest.param(torch.full((1, 8), -float("inf")).index_fill(1, torch.tensor([3]), 1.0), 4, 0.9, id="banned"),
    ],
)
def test_what_ties_decide(scores: Tensor, k: int, p: float) -> None:
    expected, found, at_once = both(scores, k, p)
    assert at_once is None and torch.equal(found, expected)


def test_equal_ones_that_stay_or_go_together() -> None:
    expected, found, at_once = both(row(5, 5, 1, 1), 4, 0.9)
    assert at_once is not None and torch.equal(found, expected)


class Own(TopPLogitsWarper):
    pass


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (TopKLogitsWarper(5), Own(0.9), V),
        (TopKLogitsWarper(5, filter_value=-1e4), TopPLogitsWarper(0.9), V),
        (TopKLogitsWarper(V), TopPLogitsWarper(0.9), V),
        (TopKLogitsWarper(2000), TopPLogitsWarper(0.9), 4000),
        (TopPLogitsWarper(0.9), TopKLogitsWarper(5), V),
        (TopKLogitsWarper(5), None, V),
    ],
)
def test_others_are_not_joined(first: Any, second: Any, size: int) -> None:
    assert not top_k_top_p.are_joined(first, second, torch.zeros(2, size))


def test_scores_of_a_caller_in_another_precision_are_not_joined() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert not top_k_top_p.are_joined(TopKLogitsWarper(5), TopPLogitsWarper(0.9), torch.zeros(2, V, dtype=dtype))


def test_these_are() -> None:
    assert top_k_top_p.are_joined(TopKLogitsWarper(5), TopPLogitsWarper(0.9), torch.zeros(2, V))
