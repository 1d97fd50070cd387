"""Who sees, or has changed, what a model's modules do."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastgen.patching import foreign_code, replaced_code  # noqa: E402, needs torch
from fastgen.patching.foreign_code import HostCode  # noqa: E402
from fastgen.patching.replaced_code import are_interrupted, are_of, is_watched  # noqa: E402


class _Function:
    """A callable that is no function."""

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("name", ["layer_norm", "gelu"])
@pytest.mark.parametrize(
    "replacement", [lambda stock: lambda *args: stock(*args), lambda stock: functools.wraps(stock)(_Function())]
)
def test_functions_of_torchs_that_somebody_has_replaced(name: str, replacement: Any, monkeypatch: Any) -> None:
    assert not is_watched([])
    monkeypatch.setattr(torch.nn.functional, name, replacement(getattr(torch.nn.functional, name)))
    assert is_watched([])


def test_what_torch_itself_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its compiler does when it is first imported."""
    monkeypatch.setattr(torch, "manual_seed", torch.nn.functional.gelu)
    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.softmax)
    assert not is_watched([])


def test_modules() -> None:
    layer = torch.nn.Linear(2, 2)
    assert (
        not is_watched([layer]) and are_of(set(), [layer]) and not are_of(set(), [type("Own", (torch.nn.ReLU,), {})()])
    )
    handle = layer.register_forward_hook(lambda *_: None)
    assert is_watched([layer])
    handle.remove()
    layer.forward = lambda x: x
    assert is_watched([layer])


def test_a_forward_that_is_the_modules_own() -> None:
    """transformers 4.57 leaves it on the instance once hidden states were asked for; a copy takes it along."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].forward = model[0].forward
    assert not are_interrupted(model.modules())
    assert not are_interrupted(copy.deepcopy(model).modules())
    other = torch.nn.Linear(2, 2)
    for forward in (other.forward, lambda x: x):
        model[0].forward = forward
        assert are_interrupted(model.modules())


@pytest.mark.parametrize("left", ["nothing", "another version"])
def test_a_host_that_was_updated_since_it_was_imported(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its models run as before: its files are no reason for an error."""
    source = tmp_path / "updated_host.py"
    source.write_text("from torch import nn\ndef helper(x): return x\nclass Layer(nn.Module): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    host = importlib.import_module("updated_host")
    try:
        source.unlink() if left == "nothing" else source.write_text("not (yet) written")
        code = HostCode(packages=("updated_host",))
        assert list(code.find([("", host.Layer())])) == []
        host.helper = lambda x: x + 1
        (found,) = code.find([("", host.Layer())])
        assert found.what == "calls updated_host.helper, which is not the host's own"
    finally:
        del sys.modules["updated_host"]
        foreign_code._shipped_names.cache_clear()


def test_a_class_that_another_thread_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread decodes, a model's class may have a method that is put back at any time."""

    class Model(torch.nn.Module):
        pass

    looks = iter([{"__call__": torch.nn.Module.__call__}])  # what is there at the first look, and at no other

    def seen(owner: type) -> Any:
        return next(looks, {}) if owner is Model else vars(owner)

    monkeypatch.setattr(replaced_code, "vars", seen, raising=False)
    assert not replaced_code.is_replaced(Model, "__call__")
    assert not replaced_code.is_replaced(Model, "__call__")


def test_all_functions_that_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told apart by what stands in their place, not by their names."""
    before = foreign_code.around_all_models()
    monkeypatch.setattr(torch, "relu", lambda rows: rows)
    first = foreign_code.around_all_models()
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda rows: rows)
    both = foreign_code.around_all_models()
    assert list(replaced_code.replaced_functions()) == ["torch.relu", "torch.nn.functional.gelu"]
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda rows: 2 * rows)
    assert len({before, first, both, foreign_code.around_all_models()}) == 4
    monkeypatch.undo()
    assert foreign_code.around_all_models() == before


def test_hooks_on_all_modules_come_and_go() -> None:
    before = foreign_code.around_all_models()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    during = foreign_code.around_all_models()
    handle.remove()
    assert before == foreign_code.around_all_models() != during
