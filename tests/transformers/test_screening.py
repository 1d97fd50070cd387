"""Greedy search on logits of which only the largest is computed: the same tokens, and whoever looks gets all logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from fastgen import packing, products
from fastgen.optimizer.transformers import host

pytestmark = pytest.mark.skipif(not host.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")

GREEDY = dict(num_beams=1, do_sample=False, max_new_tokens=14, return_dict_in_generate=False, tier="compat")
# Behind the head comes soft-capping; and the generation configuration asks for processors.
UNSCREENED = {"gemma2", "blenderbot"}


@pytest.fixture(autouse=True)
def _always() -> Iterator[None]:
    if products._skinny() is None:
        pytest.skip("there is no native operator here")
    packing.release()
    with harness.configured(packing="always", replay="always"):
        yield
    packing.release()


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each screened product that was not replayed, its rows and how many outputs were left out."""
    found: list[tuple[int, int]] = []
    plan = products.Products._screened_plan

    def noting(self: Any, layer: Any, rows: Any, skinny: Any) -> Any:
        made = plan(self, layer, rows, skinny)
        product = made.product

        def noted(rows: Any, weights: Any, bias: Any) -> Any:
            output = product(rows, weights, bias)
            found.append((len(rows), int((output == -torch.inf).sum())))
            return output

        made.product = noted
        return made

    monkeypatch.setattr(products.Products, "_screened_plan", noting)
    return found


def _inputs(family: str, seed: int = 0, **shape: Any) -> dict[str, Any]:
    return {**zoo.inputs_for(family, seed=seed, **shape), **zoo.FAMILIES[family].generate}


@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_families(family: str, screened: list[tuple[int, int]]) -> None:
    model = copy.deepcopy(zoo.load(family))
    for seed in (0, 1):
        harness.compare(model, _inputs(family, seed), **GREEDY)
    assert bool(screened) is (family not in UNSCREENED)
    assert not screened or sum(left for _, left in screened), "no output was left out"


@pytest.mark.parametrize("batch", [1, 3])
def test_a_later_call_replays_them(batch: int, screened: list[tuple[int, int]]) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for seed in range(3):
        screened.clear()
        harness.compare(model, _inputs("llama", seed, batch=batch), **GREEDY)
    assert not screened and packing.count()


def _final_bias(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    return {}


def _processor(model: Any) -> dict[str, Any]:
    return {"logits_processor": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.5)])}


def _asks_for(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"return_dict_in_generate": True, **options}


def _sampling(model: Any) -> dict[str, Any]:
    return {"do_sample": True}


def _hook(model: Any) -> dict[str, Any]:
    model.lm_head.register_forward_hook(lambda module, inputs, output: model.seen.append(output.detach().clone()))
    return {}


@pytest.mark.parametrize(
    "change",
    [_final_bias, _processor, _asks_for(output_logits=True), _asks_for(output_scores=True), _sampling, _hook],
)
def test_whoever_looks_gets_all_logits(change: Any, screened: list[tuple[int, int]]) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    model.seen = []
    options = {**GREEDY, **change(model)}
    harness.compare(model, _inputs("bart"), **options)
    assert not screened and all((output > -torch.inf).all() for output in model.seen)


def test_a_bias_that_comes_later(screened: list[tuple[int, int]]) -> None:
    """A recording that screens is not for a model whose logits are no longer the head's products."""
    model = copy.deepcopy(zoo.load("bart"))
    for seed in (0, 1):
        harness.compare(model, _inputs("bart", seed), **GREEDY)
    assert screened
    screened.clear()
    for change in (_final_bias, lambda model: model.final_logits_bias.zero_()):
        change(model)
        for seed in (2, 3):
            harness.compare(model, _inputs("bart", seed), **GREEDY)


def test_weights_that_change_between_calls() -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for step in range(3):
        harness.compare(model, _inputs("llama", step), **GREEDY)
        with torch.no_grad():
            model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(0))


def test_negative_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If what is left out were decided by false codes, the comparison would tell."""
    model = copy.deepcopy(zoo.load("llama"))
    codes_of = packing.screening_of

    def false_codes(layer: Any) -> Any:
        codes, scales, errors = codes_of(layer)
        return codes.flip(0).contiguous(), scales, errors * 0

    monkeypatch.setattr(packing, "screening_of", false_codes)
    with pytest.raises(AssertionError):
        harness.compare(model, _inputs("llama"), **GREEDY)


@pytest.mark.parametrize("which", [0, 3, 13])
def test_ends_at_once_later_or_last(which: int, screened: list[tuple[int, int]]) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    inputs = _inputs("llama", batch=3, ragged=True)
    whole = zoo.generate(model, harness.request(inputs, {k: v for k, v in GREEDY.items() if k != "tier"}))
    end = int(whole[0, inputs["input_ids"].shape[1] + which])
    harness.compare(model, inputs, **GREEDY, eos_token_id=[end, int(whole[-1, -1])])
    assert screened
