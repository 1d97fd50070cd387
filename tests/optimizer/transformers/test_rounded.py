"""Weights in fewer bits: the user's choice, near the host's scores, said in status, and gone when it is taken back."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen import report
from fastgen.layers import quantized
from fastgen.optimizer.transformers import versions
from fastgen.replay import program

pytestmark = pytest.mark.usefixtures("rounded_weights")
NAMES = ["bart", "t5", "marian", "gpt2", "llama"]


@pytest.fixture(params=["int8", "bf16"])
def rounded(request: Any) -> dict[str, str]:
    """The settings with which weights are rounded."""
    return {"weights": request.param, "packing": "always"}


def first_scores(output: Any) -> torch.Tensor:
    """Log-probabilities of the first step."""
    scores = torch.log_softmax(output.logits[0], -1)
    assert isinstance(scores, torch.Tensor)
    return scores


@pytest.mark.always
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_near_the_hosts(name: str, batch: int, beams: int, rounded: dict[str, str]) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=batch)
    options = dict(num_beams=beams, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
    stock = harness.run_stock(model, inputs, **options)
    with fastgen.configured(**rounded):
        output, calls = harness.run_fastgen(model, inputs, **options)
    assert calls[-1].tier != "stock"
    said = fastgen.status().quantized
    assert said and not said.startswith("0 ")
    difference = (first_scores(output) - first_scores(stock)).abs().max()
    largest = (first_scores(stock) - first_scores(stock).mean()).abs().max()
    assert 1e-5 * largest < difference < 0.2 * largest


@pytest.mark.always
@pytest.mark.parametrize("batch", [1, 6])  # few rows, and many
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_steps_recorded_with_other_weights_are_not_replayed(
    name: str, batch: int, rounded: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := quantized.unavailable(quantized.WAYS[rounded["weights"]][int(batch > 4)].product)) is not None:
        pytest.skip(why)
    monkeypatch.setattr(program, "python", None)  # what can't run natively
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=batch)
    options = dict(num_beams=3, max_new_tokens=12, min_new_tokens=12, output_logits=True, return_dict_in_generate=True)
    stock = harness.run_stock(model, inputs, **options)
    for _ in range(2):
        with fastgen.configured(replay="always"):
            output, _ = harness.run_fastgen(model, inputs, **options)
            harness.assert_same(stock, output)
            with fastgen.configured(**rounded):
                others = [harness.run_fastgen(model, inputs, **options)[0] for _ in range(2)]
        scores = [first_scores(other) for other in others]
        torch.testing.assert_close(scores[0], scores[1])
        assert not torch.allclose(scores[0], first_scores(stock), rtol=1e-5, atol=1e-5)
    assert bool(fastgen.status().replayed) is versions.COUNTS_IN_TENSORS, "4.57's steps are never replayed"


def test_an_unknown_model_is_tried_in_float32(rounded: dict[str, str]) -> None:
    """Whether a model may run on the tree is decided by its logits, which are others with rounded weights."""

    class Mine(type(zoo.load("bart"))):  # type: ignore[misc]
        pass

    model = zoo.load("bart")
    mine = Mine(model.config).eval()
    mine.load_state_dict(model.state_dict())
    inputs = zoo.inputs_for("bart", batch=2)
    with fastgen.configured(foreign_code="trial", **rounded):
        _, calls = harness.run_fastgen(mine, inputs, num_beams=3, max_new_tokens=8)
    assert calls[-1].tier != "stock", calls[-1].reason


def test_status_forgets_what_was_released(rounded: dict[str, str]) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=2)
    with fastgen.configured(**rounded):
        harness.run_fastgen(model, inputs, num_beams=3, max_new_tokens=6)
    assert "rounded weights: " in str(fastgen.status()) and fastgen.status().packed_bytes
    fastgen.release()
    assert "rounded weights" not in str(fastgen.status()) and not fastgen.status().packed_bytes
    report.reset()
