"""Checkpoints that torchao and quanto have quantised: accelerated where weights alone are, else left to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import zoo
from harness import configured

from fastgen.replay import statistics

FAMILIES = ["bart", "gemma2", "llama", "marian", "opt", "t5"]
SEARCHES: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=4, return_dict_in_generate=True, output_scores=True),
    "sentences leave": dict(num_beams=3, return_dict_in_generate=False, num_return_sequences=2),
    "greedy": dict(num_beams=1),
    "samples": dict(do_sample=True, num_return_sequences=3),
}


def _torchao(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


def _quanto(**what: str) -> Any:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from transformers import QuantoConfig

    return QuantoConfig(**what)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "torchao-int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao-float8": lambda: _torchao("Float8WeightOnlyConfig"),
    "quanto-int8": lambda: _quanto(weights="int8"),
    "quanto-int4": lambda: _quanto(weights="int4"),
}


@functools.cache
def _saved(family: str, folder: Path) -> Path:
    zoo.load(family).save_pretrained(folder / family)
    return folder / family


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _loaded(family: str, folder: Path, config: Any) -> Any:
    return type(zoo.load(family)).from_pretrained(_saved(family, folder), quantization_config=config).eval()


def _inputs(family: str, **sizes: int) -> dict[str, Any]:
    return zoo.FAMILIES[family].inputs(zoo.load(family), **sizes)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_alone(family: str, kind: str, folder: Path) -> None:
    model = _loaded(family, folder, WEIGHTS[kind]())
    assert any(type(weight) is not torch.nn.Parameter for weight in model.parameters()), "nothing is quantised"
    for options in SEARCHES.values():
        for replay in ("off", "always"):
            with configured(replay=replay):
                harness.compare(model, _inputs(family), max_new_tokens=16, **options)
    assert statistics.counts(model).replays > 0
    harness.compare(model, _inputs(family, batch=1), max_new_tokens=40, min_new_tokens=40)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_activations_too(family: str, folder: Path) -> None:
    """How a row is rounded may depend on the others: the host decodes."""
    model = _loaded(family, folder, _torchao("Int8DynamicActivationInt8WeightConfig"))
    for options in SEARCHES.values():
        harness.compare(model, _inputs(family), expected="fallback", max_new_tokens=12, **options)


def test_quantos_activations_too() -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = zoo.fresh("llama")
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration(), torch.no_grad():
        model(**_inputs("llama"))
    quanto.freeze(model)
    harness.compare(model, _inputs("llama"), expected="fallback", num_beams=3, max_new_tokens=8)
