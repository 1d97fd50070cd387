"""What is known of a model: found in one walk over the modules, kept while nothing changes, and holding nothing."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from torch import nn

import fastgen
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model import facts
from fastgen.optimizer.transformers.replay.guards import guards_of
from fastgen.replay import store

OPTIONS = dict(num_beams=3, min_new_tokens=12, max_new_tokens=12)


def _decoded(model: Any, family: str, **options: Any) -> None:
    harness.compare(model, zoo.inputs_for(family), **{"tier": "fast", **OPTIONS, **options})


def _hook(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: (model, output)[1])


def _replace_weight(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


def _attribute(model: Any) -> None:
    model.itself = types.SimpleNamespace(model=model)


def _cycle(model: Any) -> None:
    model.notes = {"model": model, "weight": model.get_output_embeddings().weight}


def _class_of_its_own(model: Any) -> None:
    class Head(type(model.get_output_embeddings())):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * (1 if self is model.get_output_embeddings() else 2)

    model.get_output_embeddings().__class__ = Head


def _class_and_code_of_its_own(model: Any) -> None:
    class Head(type(model.get_output_embeddings())):  # type: ignore[misc]
        def also(self) -> Any:
            return model

    head = model.get_output_embeddings()
    head.__class__, head.counted = Head, Counter().update


CHANGES: dict[str, Callable[[Any], None]] = {
    "as it was": lambda model: None,
    "hook": _hook,
    "weight": _replace_weight,
    "attribute": _attribute,
    "in its own list": _cycle,
    "class": _class_of_its_own,
    "class and code": _class_and_code_of_its_own,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_the_model_is_freed(family: str, change: Callable[[Any], None]) -> None:
    model = zoo.fresh(family)
    _decoded(model, family)
    change(model)
    model.generate(**zoo.inputs_for(family), **OPTIONS)
    model.generate(**zoo.inputs_for(family), **OPTIONS)
    held = [weakref.ref(model), weakref.ref(model.get_output_embeddings().weight)]
    del model
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_weights_that_were_replaced_are_freed() -> None:
    model = zoo.fresh("bart")
    _decoded(model, "bart")
    held = weakref.ref(model.model.decoder.layers[0].fc1.weight)
    model.model.decoder.layers[0].fc1 = copy.deepcopy(model.model.decoder.layers[1].fc1)
    _decoded(model, "bart")
    gc.collect()
    assert held() is None


def test_weights_may_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Module.to` may swap tensors, which torch refuses where somebody has a weak reference to one."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = zoo.fresh("bart")
    _decoded(model, "bart")
    model.to(torch.float64)
    _decoded(model, "bart")
    model.load_state_dict(copy.deepcopy(model).state_dict())
    _decoded(model, "bart")


@pytest.mark.parametrize("packing", ["always", "off"])
@pytest.mark.parametrize("family", ["bart", "llama", "gpt2"])
def test_weights_of_recorded_steps_may_be_swapped(family: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, inputs = zoo.fresh(family), zoo.inputs_for(family, batch=1)
    options = dict(max_new_tokens=20, min_new_tokens=20, num_beams=1)
    with fastgen.configured(replay="always", packing=packing):
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            harness.compare(model, inputs, **options, return_dict_in_generate=False)
            assert bool(store.count(model)) is versions.COUNTS_IN_TENSORS, "4.57's steps are never replayed"


class _Weight(nn.Parameter):
    pass


def test_a_swapped_tensor_is_seen() -> None:
    """`torch.utils.swap_tensors` gives the same object another class and other values."""
    model = zoo.fresh("bart")
    guards = guards_of(model.modules())
    assert guards.is_complete and guards.is_current() and guards.is_same_code()
    weight = model.model.decoder.layers[0].fc1.weight
    torch.utils.swap_tensors(weight, _Weight(weight.detach() + 1))
    assert not guards.is_current() and not guards.is_same_code()


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_switched_off_and_on(family: str) -> None:
    """fastgen's own patches, made anew, are no change of the model."""
    model = zoo.fresh(family)
    guards = guards_of(model.modules())
    with fastgen.disabled():
        assert guards.is_current()
    assert guards.is_current()


def _same_object(weight: nn.Parameter) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() + 1))


def _other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def _write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


@pytest.mark.parametrize("change", [_same_object, _other_memory, _write])
def test_other_values_are_seen(change: Callable[[nn.Parameter], None]) -> None:
    model = zoo.fresh("bart")
    guards = guards_of(model.modules())
    assert guards.is_current()
    change(model.model.decoder.layers[0].fc1.weight)
    assert guards.is_same_code() and not guards.is_current()


def test_a_weight_at_the_same_address_is_seen() -> None:
    """A new tensor may have the id and the memory of one that is gone."""
    model = zoo.fresh("bart")
    layer = model.model.decoder.layers[0].fc1
    guards, shape = guards_of(model.modules()), layer.weight.shape
    for _ in range(20):
        del layer.weight
        layer.weight = nn.Parameter(torch.empty(shape))
        assert not guards.is_current()


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often somebody of fastgen has asked a model for all modules, by whom."""
    counts: Counter[str] = Counter()

    def watch(name: str) -> None:
        stock = getattr(nn.Module, name)

        def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = sys._getframe(1).f_code.co_filename.rpartition("/fastgen/")[2]
            if path.startswith(("optimizer", "replay", "layers")):
                counts[path] += 1
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, name, counted)

    watch("modules")
    watch("named_modules")
    return counts


@pytest.mark.parametrize("family", ["bart", "llama", "t5"])
def test_a_known_model_is_not_walked(family: str, walks: Counter[str]) -> None:
    model, options = zoo.fresh(family), {**OPTIONS, **zoo.FAMILIES[family].generate}
    model.generate(**zoo.inputs_for(family), **options)
    assert walks["optimizer/transformers/model/facts.py"] >= 1, "nobody has looked at the model"
    walks.clear()
    for seed in (1, 2):
        model.generate(**zoo.inputs_for(family, seed=seed), **options)
        assert not walks, "a model that has not changed is walked again"


def test_each_call_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stock = facts._looked_up
    monkeypatch.setattr(facts, "_looked_up", lambda model: (asked.append(id(model)), stock(model))[1])
    model = zoo.fresh("bart")
    for _ in range(2):
        asked.clear()
        _decoded(model, "bart")
        assert asked.count(id(model)) == 1  # 4.57 tries a copy, too


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_change_between_calls_is_seen(family: str) -> None:
    """What was found holds for one call: the next looks again."""
    model = zoo.fresh(family)
    _decoded(model, family)
    with facts.one_call():
        before = facts.facts_of(model)
        handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 1)
        assert facts.facts_of(model) is before
    assert facts.facts_of(model).foreign
    handle.remove()
    assert not facts.facts_of(model).foreign
    _decoded(model, family)
