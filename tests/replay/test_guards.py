"""Guards see what changes in a model's code and tensors, and keep none of them alive."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="guards look at torch's modules")

import torch
from torch import Tensor, nn

from fastgen.replay.guards import Host, ModelGuards

COUNT = 3
HERE = sys.modules[__name__]


class Settings:
    """A config of the host's."""

    def __init__(self) -> None:
        self.scale, self.names = 2.5, ["a", "b"]


class Cache:
    """Something of the host's of which no step knows."""


class Weight(nn.Parameter):
    pass


def doubled(rows: Tensor) -> Tensor:
    return rows * 2


def hook(*arguments: Any) -> None:
    pass


class Base(nn.Module):
    factor = 1.5


class Decoder(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.register_buffer("shift", torch.randn(4))
        self.settings, self.cache, self.name = Settings(), Cache(), "decoder"
        self.sizes, self.masks = [1, {"a": (2, 3)}], {"causal": torch.ones(4)}
        self.activation = functools.partial(doubled)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.activation(self.first(rows)) + self.shift) * self.factor


class Other(Decoder):
    pass


REGISTERED = {"attention": doubled}
PACKAGE = __name__.partition(".")[0]
HOST = Host((PACKAGE, "__main__"), configs=(Settings,), ignored=(Cache,), registered=lambda: [dict(REGISTERED)])


def guards_of(model: nn.Module, host: Host = HOST) -> ModelGuards:
    guards = ModelGuards(model.modules(), host)
    assert guards.is_complete and guards.is_current() and guards.is_same_code()
    return guards


Change = Callable[[Any, pytest.MonkeyPatch], Any]  # of a model, and of what is not its own

CODE: dict[str, Change] = {
    "attribute": lambda model, patch: setattr(model, "name", "encoder"),
    "new attribute": lambda model, patch: setattr(model, "size", 4),
    "no attribute": lambda model, patch: delattr(model, "name"),
    "item of a list": lambda model, patch: model.sizes.__setitem__(0, 2),
    "item of a dict in a list": lambda model, patch: model.sizes[1].update(a=(2, 4)),
    "tensor in a dict": lambda model, patch: model.masks.update(causal=torch.ones(4)),
    "config": lambda model, patch: setattr(model, "settings", copy.copy(model.settings)),
    "attribute of a config": lambda model, patch: setattr(model.settings, "scale", "2.5"),
    "list of a config": lambda model, patch: model.settings.names.append("c"),
    "function": lambda model, patch: setattr(model, "activation", functools.partial(doubled)),
    "mode": lambda model, patch: model.eval(),
    "weight": lambda model, patch: setattr(model.first, "weight", nn.Parameter(model.first.weight.detach())),
    "class of a weight": lambda model, patch: torch.utils.swap_tensors(model.first.weight, Weight(torch.ones(4, 4))),
    "buffer": lambda model, patch: setattr(model, "shift", model.shift.clone()),
    "new buffer": lambda model, patch: model.register_buffer("bias", torch.zeros(1)),
    "layer": lambda model, patch: setattr(model, "second", copy.deepcopy(model.second)),
    "new layer": lambda model, patch: model.add_module("third", nn.Identity()),
    "name of a layer": lambda model, patch: model._modules.update(third=model._modules.pop("second")),
    "order of layers": lambda model, patch: model._modules.update(first=model._modules.pop("first")),
    "hook": lambda model, patch: model.first.register_forward_hook(hook),
    "hook before": lambda model, patch: model.register_forward_pre_hook(hook),
    "own method": lambda model, patch: setattr(model, "forward", types.MethodType(Decoder.forward, model)),
    "class": lambda model, patch: setattr(model, "__class__", Other),
    "method of its class": lambda model, patch: patch.setattr(Decoder, "forward", lambda self, rows: rows),
    "attribute of a base": lambda model, patch: patch.setattr(Base, "factor", 2.0),
    "method of torch's": lambda model, patch: patch.setattr(nn.Linear, "forward", lambda self, rows: rows),
    "function beside its class": lambda model, patch: patch.setattr(HERE, "doubled", hook),
    "registered function": lambda model, patch: patch.setitem(REGISTERED, "attention", hook),
}


@pytest.mark.parametrize("change", CODE.values(), ids=list(CODE))
def test_other_code(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder()
    guards = ModelGuards(model.modules(), HOST)
    change(model, monkeypatch)
    assert not guards.is_same_code() and not guards.is_current() and not guards.is_same_memory()


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1)


VALUES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda model: write(model.second.weight),
    "buffer": lambda model: write(model.shift),
    "tensor in a dict": lambda model: write(model.masks["causal"]),
    "other memory": lambda model: setattr(model.first.weight, "data", model.first.weight.data.clone()),
    "other strides": lambda model: setattr(model.first.weight, "data", model.first.weight.data.t()),
    "swapped": lambda model: torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.ones(4, 4))),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=list(VALUES))
def test_other_values(change: Callable[[Any], Any]) -> None:
    model = Decoder()
    guards = ModelGuards(model.modules(), HOST)
    change(model)
    assert guards.is_same_code() and not guards.is_current()
    is_in_place = change in (VALUES["weight"], VALUES["buffer"], VALUES["tensor in a dict"])
    assert guards.is_same_memory() == is_in_place


def test_a_weight_at_the_same_address() -> None:
    """What is new may have the address of what is gone, an object's or its memory's."""
    model = nn.Sequential(nn.Linear(40, 40))
    guards = ModelGuards(model.modules(), HOST)
    for _ in range(20):
        model[0].weight.data = torch.empty(0)
        model[0].weight.data = torch.empty(40, 40)
        assert guards.is_same_code() and not guards.is_current() and not guards.is_same_memory()
    for _ in range(20):
        held = weakref.ref(model[0].weight)
        del model[0].weight
        assert held() is None
        model[0].weight = nn.Parameter(torch.empty(40, 40))
        assert not guards.is_current()


SAME: dict[str, Change] = {
    "call": lambda model, patch: model(torch.randn(2, 4)).sum().backward(),
    "equal text": lambda model, patch: setattr(model, "name", "".join(["deco", "der"])),
    "equal number": lambda model, patch: setattr(model.settings, "scale", float("2.5")),
    "hook of the backward pass": lambda model, patch: model.first.register_full_backward_hook(hook),
    "hook that has gone": lambda model, patch: model.register_forward_hook(hook).remove(),
    "what no step knows": lambda model, patch: setattr(model.cache, "size", 7),
    "number beside a class": lambda model, patch: patch.setattr(HERE, "COUNT", 4),
    "there and back": lambda model, patch: model.eval().train(),
}


@pytest.mark.parametrize("change", SAME.values(), ids=list(SAME))
def test_what_does_not_matter(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder()
    guards = ModelGuards(model.modules(), HOST)
    change(model, monkeypatch)
    assert guards.is_current()


def test_what_the_host_says_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How they are while nobody decodes, and which ones only call the model."""
    stock = {nn.Linear: dict(vars(nn.Linear))}
    model = nn.Sequential(nn.Linear(2, 2))
    host = dataclasses.replace(HOST, not_of_the_step=("torch.nn.modules.container",))
    guards = guards_of(model, dataclasses.replace(host, class_attributes=lambda owner: stock.get(owner, vars(owner))))
    strict = guards_of(model, host)
    monkeypatch.setattr(nn.Sequential, "forward", hook)
    assert guards.is_current() and strict.is_current()
    monkeypatch.setattr(nn.Linear, "forward", hook)
    assert guards.is_current() and not strict.is_current()


def of_module(name: str) -> nn.Module:
    return type("Foreign", (nn.Linear,), {"__module__": name})(2, 2)


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.first.register_forward_hook(hook),
    "hook before": lambda model: model.first.register_forward_pre_hook(hook),
    "class of another package": lambda model: model.add_module("third", of_module("pytest")),
    "class of the script": lambda model: model.add_module("third", of_module("__main__")),
    "class of no module": lambda model: model.add_module("third", of_module(f"{PACKAGE}.nowhere")),
    "traced": lambda model: model.add_module("third", torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))),
    "object": lambda model: setattr(model, "other", types.SimpleNamespace()),
    "model in a list": lambda model: model.sizes.append(model),
    "method": lambda model: setattr(model, "other", model.forward),
    "closure": lambda model: setattr(model, "other", lambda: model),
    "default": lambda model: setattr(model, "other", lambda rows=[]: rows),
    "object in a partial": lambda model: setattr(model, "other", functools.partial(doubled, Decoder())),
    "weight of a subclass": lambda model: setattr(model.first, "weight", Weight(torch.ones(4, 4))),
    "sparse tensor": lambda model: setattr(model, "other", torch.ones(2, 2).to_sparse()),
}


def test_a_function_with_numbers_as_defaults_is_known() -> None:
    """As `torch.nn.functional.relu`, which is an activation in fairseq's layers."""
    model = Decoder()
    model.other = nn.functional.relu
    assert nn.functional.relu.__defaults__ and ModelGuards(model.modules(), HOST).is_complete


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tracing
@pytest.mark.parametrize("change", FOREIGN.values(), ids=list(FOREIGN))
def test_what_may_change_unseen(change: Callable[[Any], Any]) -> None:
    model = Decoder()
    change(model)
    guards, held = ModelGuards(model.modules(), HOST), [weakref.ref(model), weakref.ref(model.second.weight)]
    assert not guards.is_complete
    del model
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_the_model_is_freed() -> None:
    model = nn.TransformerDecoderLayer(8, 2, 16, activation=torch.relu)
    guards = ModelGuards(model.modules(), HOST)
    assert not any(map(weakref.getweakrefcount, model.parameters())), "torch refuses to swap such weights"
    held = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert [each() for each in held] == [None] * len(held) and not guards.is_current()


def test_a_tensor_that_another_thread_adds_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the code and that at the tensors."""
    model = Decoder()
    guards = ModelGuards(model.modules(), HOST)
    assert guards.is_current() and guards.is_same_memory()
    monkeypatch.setattr(ModelGuards, "is_same_code", lambda self: True)
    model.late = torch.rand(3)
    assert not guards.is_current() and not guards.is_same_memory()
