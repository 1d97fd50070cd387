"""The paths of CUDA without a GPU: no operator gets tensors of two devices, and hypotheses are stock's on the CPU.

Tensors say that they are on `cuda:0` and are on the CPU: see kit/fake_cuda.py. Graphs are emulated.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import device_waits
import fairseq_models as models
import fake_cuda
import judge
import pytest
import torch
from fairseq.search import DiverseBeamSearch
from fake_cuda import to_cpu, to_cuda

import fastgen
from fastgen.replay import statistics

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py runs there")
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": dict(beam_size=4),
    "rules": dict(beam_size=3, len_penalty=2.0, min_len=6, unk_penalty=0.5),
    "bans": dict(beam_size=4, no_repeat_ngram_size=2),
    "one": dict(beam_size=1, max_len_b=20),
    "diverse": dict(beam_size=4, strategy=lambda words: DiverseBeamSearch(words, 2, 0.5)),
}
graphs = pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Nothing on the device is kept for later tests."""
    yield
    fastgen.release()


def _check(name: str, run: Any, graphs: bool, sample: Any, **options: Any) -> fake_cuda.Device:
    """The hypotheses are those of the CPU: stock's, but with banned n-grams, which stock does not ban, fastgen's."""

    def on_cpu() -> Any:
        return run(models.load(name), sample, **options)

    expected = judge.ours(on_cpu)[0] if "no_repeat_ngram_size" in options else judge.stock(on_cpu)
    model = fake_cuda.move(copy.deepcopy(models.load(name)).requires_grad_(False))
    options = {option: to_cuda(value) for option, value in options.items()}
    with fake_cuda.device() as device, judge.configured(cuda_graphs=graphs):
        for _ in range(1 + graphs):
            found, calls = judge.ours(lambda: run(model, to_cuda(sample), **options))
            assert not device.mixed and not device.refused, (device.mixed, device.refused)
            assert {call.tier for call in calls} <= {"fast", "compat"}, calls
            judge.assert_same(expected, to_cpu(found))
        if graphs and "strategy" not in options:
            assert statistics.counts(model).replays, statistics.replayed()
    return device


@graphs
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["pre-norm", "bart", "prophetnet", "adaptive"])
def test_options(name: str, options: str, graphs: bool) -> None:
    _check(name, models.generate, graphs, models.batch(), **OPTIONS[options])


@graphs
@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_translators(name: str, graphs: bool) -> None:
    _check(name, models.generate, graphs, models.batch(left=False), beam_size=3)


@graphs
@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_language_models(name: str, graphs: bool) -> None:
    _check(name, models.prompted, graphs, models.prompts((3, 8, 5)), beam_size=4, max_len_b=20, min_len=18)


@graphs
@pytest.mark.parametrize("name", ["pre-norm", "bart", "prophetnet"])
def test_sentences_leave(name: str, graphs: bool) -> None:
    sample, prefix = models.staggered(9)
    _check(name, models.generate, graphs, sample, prefix=prefix, beam_size=3, max_len_b=20)


# As in the adapter for transformers: in fastgen's code, there for an earlier step, and in fairseq's.
WAITS = {"steps": (1, 0, 0), "graphs": (0, 1, 0)}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("name", ["pre-norm", "bart", "prophetnet", "adaptive", "lm"])
def test_waits_of_a_step(name: str, how: str) -> None:
    """Printed with `-s`; the end token is banned until the last step."""
    model = fake_cuda.move(copy.deepcopy(models.load(name)).requires_grad_(False))
    is_translator = name in models.TRANSLATORS
    run, sample = (models.generate, models.batch()) if is_translator else (models.prompted, models.prompts((3, 8, 5)))

    def decode(count: int) -> None:
        with judge.configured(cuda_graphs=how == "graphs"):
            judge.ours(lambda: run(model, to_cuda(sample), beam_size=4, max_len_b=count, min_len=count))

    waits = device_waits.of_a_step(decode, f"{name:12} {how:7}")
    assert all(map(operator.le, waits, WAITS[how]))
