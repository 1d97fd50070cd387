"""Prompts' keys and values that were computed with one adapter never serve another, or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

peft = pytest.importorskip("peft", reason="PEFT is not installed")

import harness  # noqa: E402, needs torch
import torch  # noqa: E402
import zoo  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cache import by_model  # noqa: E402


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with harness.keeping_prefixes():
        yield


def build() -> Any:
    """Two adapters, which add something from the beginning."""
    torch.manual_seed(0)
    model = copy.deepcopy(zoo.load("llama"))
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, config, adapter_name="first")
    model.add_adapter("second", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def hits(model: Any, inputs: Any) -> int:
    """Compare a call with stock; how many times it began with a kept prefix."""
    options = dict(num_beams=3, max_new_tokens=6)
    before = by_model.counts().get("hits", 0)
    ours = model.generate(**inputs, **options)
    with fastgen.disabled():
        stock = model.generate(**inputs, **options)
    assert torch.equal(ours, stock)
    return by_model.counts()["hits"] - before


def test_adapters_take_turns() -> None:
    model, inputs = build(), zoo.inputs_for("llama", length=30, ragged=False)
    seen = []
    for adapter in ("first", "second", "first", "second"):
        model.set_adapter(adapter)
        seen.append(hits(model, inputs))
    with model.disable_adapter():
        seen += [hits(model, inputs), hits(model, inputs)]
    assert seen == [0, 0, 1, 1, 0, 1]


def test_another_scaling_or_weight_never_hits() -> None:
    model, inputs = build(), zoo.inputs_for("llama", length=30, ragged=False)
    model.set_adapter("first")
    assert [hits(model, inputs), hits(model, inputs)] == [0, 1]
    layer = model.base_model.model.model.layers[0].self_attn.v_proj
    layer.scaling["first"] *= 3
    assert [hits(model, inputs), hits(model, inputs)] == [0, 1]
    layer.lora_B["first"].weight.data.add_(0.2)
    assert [hits(model, inputs), hits(model, inputs)] == [0, 1]
    model.merge_adapter()
    assert [hits(model, inputs), hits(model, inputs)] == [0, 1]
