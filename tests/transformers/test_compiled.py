"""configure(compile=True): the same output, compiled code that stays in our steps, and reasons where there is none."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from typing import Any

import both_hosts
import harness
import pytest
import torch
import zoo

import fastgen
from fastgen import products
from fastgen.cache import tree
from fastgen.optimizer.transformers import compiled

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="needs a C++ compiler"
)
TOKENS = dict(return_dict_in_generate=False)  # sentences may leave
OPTIONS: dict[str, Any] = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0, **TOKENS)


@pytest.fixture(autouse=True)
def _compiling() -> Iterator[None]:
    fastgen.configure(compile=True, strict=True)
    yield
    fastgen.configure(compile=False, packing="auto")
    compiled.release()


def _step(model: Any) -> compiled.CompiledStep:
    return compiled._steps[model]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({"bart", "gpt2", "t5", "llama", "marian"}.intersection(zoo.ACCELERATED)))
def test_identical(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers; sentences that leave, slots that are pruned, threads, and the user's own calls beside them."""
    model = zoo.load(family)
    inputs = {**zoo.FAMILIES[family].inputs(model, batch=6), **zoo.FAMILIES[family].generate}
    stock = harness.run_stock(model, inputs, **OPTIONS)
    for tier in ("fast", "compat"):
        harness.compare(model, inputs, tier=tier, stock=stock, **OPTIONS)
    step = _step(model)
    assert step.failure is None and step.graphs > 0 and step.seconds > 0
    assert f"compiled {type(model).__name__}: {step}" in " ".join(str(fastgen.status()).split())

    monkeypatch.setattr(tree, "FIRST_STEPS", 3)  # slots are pruned, and grow
    harness.compare(model, inputs, tier="fast", num_beams=3, min_new_tokens=20, max_new_tokens=20, **TOKENS)
    assert step.failure is None

    def generate() -> None:
        assert torch.equal(zoo.generate(model, inputs, **OPTIONS), stock)

    def differentiate() -> None:
        labels = torch.full((6, 4), 7) if model.config.is_encoder_decoder else inputs["input_ids"]
        twin = copy.deepcopy(model).requires_grad_()
        twin(**inputs, labels=labels).loss.backward()
        assert any(parameter.grad is not None for parameter in twin.parameters())

    both_hosts.run_together([generate, generate, torch.enable_grad()(differentiate)], 2)
    assert step.failure is None
    graphs = step.graphs
    with torch.no_grad(), fastgen.disabled():
        generate()
    assert step.graphs == graphs


@needs_compiler
@pytest.mark.slow
def test_a_layer_that_was_replaced() -> None:
    """The graph knows layers by number: it must notice a new one."""
    model, inputs = copy.deepcopy(zoo.load("bart")), zoo.inputs_for("bart")
    harness.compare(model, inputs, tier="fast", num_beams=3, max_new_tokens=6)
    layer = model.model.decoder.layers[0]
    layer.fc1 = copy.deepcopy(layer.fc1)
    layer.fc1.weight.data.mul_(-2)
    harness.compare(model, inputs, tier="fast", num_beams=3, max_new_tokens=6)
    assert _step(model).failure is None


@needs_compiler
@pytest.mark.slow
def test_few_rows_are_multiplied_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights as they are then, without a call of the layer; many rows are multiplied outside of it."""
    if products._skinny() is None:
        pytest.skip("there is no native operator here")
    monkeypatch.setattr(products, "_MIN_ELEMENTS", 1)
    monkeypatch.setattr(products, "_is_faster", lambda *_: True)  # whatever the clock says of such small ones
    monkeypatch.setattr(products, "_verdicts", {})
    outside: list[int] = []
    linear = compiled._linear

    def counted(rows: Any, *arguments: Any) -> Any:
        outside.append(rows.shape[0])
        return linear(rows, *arguments)

    with torch.library._scoped_library("fastgen_step", "IMPL") as library:
        library.impl("linear", counted, "CPU", allow_override=True)
        model, inputs = copy.deepcopy(zoo.load("bart")), zoo.inputs_for("bart")
        few = {name: value[:2] for name, value in inputs.items()}
        harness.compare(model, few, tier="fast", num_beams=3, max_new_tokens=6)
        assert _step(model).failure is None and _step(model).graphs > 0 and not outside
        before = harness.run_stock(model, few, num_beams=3, max_new_tokens=6)
        for layer in model.model.decoder.layers:
            layer.fc2.weight.data.mul_(-3)
        assert not torch.equal(before, harness.run_stock(model, few, num_beams=3, max_new_tokens=6))
        harness.compare(model, few, tier="fast", num_beams=3, max_new_tokens=6)
        assert not outside
        harness.compare(model, few, tier="fast", num_beams=8, max_new_tokens=6)
        assert set(outside) == {16}
        outside.clear()
        fastgen.configure(packing="off")
        harness.compare(model, few, tier="fast", num_beams=3, max_new_tokens=6)
        assert set(outside) == {6}


@pytest.mark.parametrize("family", sorted({"bart_eager", "led"}.intersection(zoo.ACCELERATED)))
def test_what_is_not_compiled_says_why(family: str) -> None:
    model, inputs = zoo.load(family), {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}
    harness.compare(model, inputs, tier="fast", num_beams=3, max_new_tokens=6)
    assert "attention" in (_step(model).failure or "")
    assert "not compiled: " in fastgen.status().compiled[type(model).__name__]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    attempts = []

    def fails(*_: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch._inductor, "compile", fails)
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart")
    harness.compare(model, inputs, tier="fast", num_beams=3, max_new_tokens=6)
    assert "no compiler here" in (_step(model).failure or "")
    assert len(attempts) == 1, "it is tried once"


@pytest.mark.skipif("bart_eager" not in zoo.ACCELERATED, reason="left to stock by this version")
def test_release_and_disable_drop_compiled_code() -> None:
    for drop in (fastgen.release, fastgen.disable):
        model, inputs = zoo.load("bart_eager"), zoo.inputs_for("bart_eager")
        forward = type(model).forward
        zoo.generate(model, inputs, num_beams=2, max_new_tokens=3)
        assert type(model).forward is forward and fastgen.status().compiled
        drop()
        assert not fastgen.status().compiled
        fastgen.enable()


def test_off_by_default() -> None:
    fastgen.configure(compile=False)
    harness.compare(zoo.load("bart"), zoo.inputs_for("bart"), tier="fast", num_beams=2, max_new_tokens=3)
    assert not fastgen.status().compiled
