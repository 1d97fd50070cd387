"""Samples in the host's loop: drawn by our operator, the same as by torch's, and nothing of it is seen outside."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import zoo

from fastgen import ops
from fastgen.bench.soak.modes import default_dtype
from fastgen.optimizer.transformers.generate import multinomial

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = dict(num_beams=1, do_sample=True, max_new_tokens=12, min_new_tokens=12)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What our operator was asked to draw from."""
    if not multinomial.draws_as_torch():
        pytest.skip("this build of torch draws otherwise")
    seen: list[torch.Tensor] = []
    draw = ops.multinomial
    monkeypatch.setattr(ops, "multinomial", lambda given, **more: seen.append(given) or draw(given, **more))
    return seen


def test_the_native_operator_is_used_whatever_torchs_defaults_are() -> None:
    """Where no native library could be had there is nothing to use."""
    multinomial.draws_as_torch.cache_clear()
    with default_dtype(torch.float64):
        assert multinomial.draws_as_torch() is ops.has_runtime()


@pytest.mark.parametrize("warped", [{"top_k": 0}, {"top_k": 20, "top_p": 0.8}, {"top_k": 1}])
@pytest.mark.parametrize("family", ["bart", "gpt2", "t5"])
def test_drawn_by_ours(draws: list[torch.Tensor], family: str, warped: dict[str, Any]) -> None:
    inputs = {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}
    harness.compare(zoo.load(family), inputs, **OPTIONS, **warped)
    assert len(draws) >= 12 and all(type(given) is torch.Tensor for given in draws)


def test_another_draw_is_noticed(draws: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "multinomial", lambda given: given.argmin(-1))
    inputs = {**zoo.inputs_for("bart"), **zoo.FAMILIES["bart"].generate}
    with pytest.raises(AssertionError, match="sequences differ"):
        harness.compare(zoo.load("bart"), inputs, **OPTIONS)


def test_what_is_returned_is_of_no_class_of_ours(draws: list[torch.Tensor]) -> None:
    inputs = {**zoo.inputs_for("bart"), **zoo.FAMILIES["bart"].generate}
    output, _ = harness.run_fastgen(zoo.load("bart"), inputs, **OPTIONS)
    assert type(output) is torch.Tensor and draws
    before = len(draws)
    details = dict(return_dict_in_generate=True, output_scores=True)
    output, _ = harness.run_fastgen(zoo.load("bart"), inputs, **OPTIONS, **details)
    assert all(type(scores) is torch.Tensor for scores in output.scores) and len(draws) == before


def test_other_functions_get_an_ordinary_tensor() -> None:
    scores = torch.randn(2, 5).as_subclass(multinomial.Scores)
    assert type(scores + 1) is type(scores.argmax(-1)) is type(torch.stack([scores])) is torch.Tensor
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    assert type(probabilities * 2) is torch.Tensor
    plain = probabilities.as_subclass(torch.Tensor)
    for more in ({"num_samples": 2}, {"num_samples": 1, "replacement": True}, {"num_samples": 1}):
        torch.manual_seed(1)
        found = [torch.multinomial(probabilities, **more), torch.multinomial(input=probabilities, **more)]
        torch.manual_seed(1)
        expected = [torch.multinomial(plain, **more) for _ in found]
        assert all(type(a) is torch.Tensor and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
