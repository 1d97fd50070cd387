"""What the user's code raises comes out as from stock, whatever it is, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search, sequence_generator
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

import fastgen


class Mine(BaseException):
    """Nobody else knows it."""


ERRORS = [StopIteration, GeneratorExit, KeyboardInterrupt, MemoryError, SystemExit, Mine, ValueError]


class Failing:
    """Raises an error at its call of this number, and at none once it has."""

    def __init__(self, kind: type[BaseException], at: int) -> None:
        self.error, self._left = kind("of mine"), at

    def __call__(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise self.error


def _hook(path: str) -> Callable[[Any, Failing], Any]:
    def change(model: Any, failing: Failing) -> Any:
        model.get_submodule(path).register_forward_pre_hook(lambda module, args: failing())

    return change


def _forward(path: str) -> Callable[[Any, Failing], Any]:
    def change(model: Any, failing: Failing) -> Any:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *args, **kwargs: failing() or forward(*args, **kwargs)

    return change


def _parametrisation(path: str) -> Callable[[Any, Failing], Any]:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing: Any = None

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            if self.failing is not None:
                self.failing()
            return weight

    def change(model: Any, failing: Failing) -> Any:
        same = Same()
        nn.utils.parametrize.register_parametrization(model.get_submodule(path), "weight", same)
        same.failing = failing

    return change


CHANGES = {
    "fc1": _hook("decoder.layers.1.fc1"),
    "k_proj": _hook("decoder.layers.0.self_attn.k_proj"),
    "v_proj": _forward("decoder.layers.0.self_attn.v_proj"),
    "weight": _parametrisation("decoder.layers.0.self_attn.q_proj"),
    "source": _hook("decoder.layers.0.encoder_attn.k_proj"),
    "encoder": _hook("encoder.layers.1.fc2"),
    "encoder's forward": _forward("encoder"),
}


@pytest.mark.parametrize("tier", ["auto", "fast"])
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_errors_of_the_models(change: Any, kind: type[BaseException], tier: str) -> None:
    """In a step, in the prompt, in the source, in the encoder: the very object that was raised."""
    model = copy.deepcopy(models.load("post-norm"))
    failing = Failing(kind, 1)
    change(model, failing)
    run = functools.partial(models.generate, model, models.batch(), beam_size=3)
    threads = threading.active_count()
    with judge.configured(tier=tier), pytest.raises(kind) as raised:
        run()
    assert raised.value is failing.error
    assert threading.active_count() == threads
    judge.assert_same(judge.stock(run), judge.ours(run, strict=False)[0])
    judge.compare(lambda: models.generate("post-norm", models.batch()))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_a_language_model(kind: type[BaseException]) -> None:
    model = copy.deepcopy(models.load("lm"))
    failing = Failing(kind, 4)
    _hook("decoder.layers.0.self_attn.v_proj")(model, failing)
    with pytest.raises(kind) as raised:
        models.prompted(model)
    assert raised.value is failing.error
    judge.compare(lambda: models.prompted(model))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_a_prefix_function(kind: type[BaseException]) -> None:
    failing = Failing(kind, 9)

    def allowed(sentence: int, tokens: Any) -> list[int]:
        failing()
        return [*range(4, 30), models.EOS]

    strategy = functools.partial(search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=allowed)
    with pytest.raises(kind) as raised:
        models.generate("post-norm", models.batch(), strategy=strategy)
    assert raised.value is failing.error
    judge.compare(lambda: models.generate("post-norm", models.batch(), strategy=strategy))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_of_the_generators_rules(kind: type[BaseException]) -> None:
    failing = Failing(kind, 2)

    class Own(SequenceGenerator):
        def is_finished(self, *args: Any) -> Any:
            failing()
            return super().is_finished(*args)

    model = models.load("post-norm")
    generator = Own([model], models.dictionary(), beam_size=3, max_len_b=9)
    with pytest.raises(kind) as raised:
        generator.generate([model], models.batch())
    assert raised.value is failing.error
    judge.compare(lambda: generator.generate([model], models.batch()))


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_in_one_of_several_searches(kind: type[BaseException], refill: bool, monkeypatch: Any) -> None:
    """None ends the others' results early, and no thread is left."""
    model, failing = models.load("post-norm"), Failing(kind, 3)
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=9)
    generate = SequenceGenerator.generate

    def own(self: Any, *args: Any) -> Any:
        failing()
        return generate(self, *args)

    # Code of the user's in a search is seen, and no search of several is refilled: this looks like the host's.
    monkeypatch.setattr(SequenceGenerator, "generate", types.FunctionType(
        own.__code__, {**vars(sequence_generator)}, "generate", None, own.__closure__))  # fmt: skip
    samples = [models.batch(seed=seed) for seed in range(3)]
    threads = threading.active_count()
    with pytest.raises(kind) as raised:
        fastgen.generate_samples(generator, samples, refill=refill)
    assert raised.value is failing.error
    assert threading.active_count() == threads
    found = fastgen.generate_samples(generator, samples, refill=refill)
    judge.assert_same([one for each in samples for one in judge.stock(lambda s=each: generator.generate([model], s))],
                      [one for each in found for one in each])  # fmt: skip


def _outcome(run: Callable[[], Any]) -> Any:
    """The tokens, or the error."""
    try:
        return [[hypothesis["tokens"].tolist() for hypothesis in sentence] for sentence in run()]
    except (AssertionError, RuntimeError, IndexError) as error:
        return type(error), str(error).splitlines()[0]


_PADDED = torch.tensor([[1, 1, 1, 1], [5, 6, 7, 2]])
_STRATEGIES = {
    "beams": None,
    "samples": functools.partial(search.Sampling, sampling_topk=4),
    "constrained": functools.partial(
        search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=lambda batch, tokens: [2, 5, 6, 7]
    ),
}


@pytest.mark.parametrize("rows", [_PADDED, _PADDED[:1], _PADDED[:, :0]], ids=["one of two", "alone", "no width"])
@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "bart", "no-cross"])
def test_a_source_of_padding_alone(name: str, strategy: str, rows: torch.Tensor) -> None:
    """The host's scores are NaN there, which no search goes on with."""
    inputs = {"src_tokens": rows, "src_lengths": rows.ne(1).sum(1), "prev_output_tokens": rows[:, :1]}
    sample = {"id": torch.arange(len(rows)), "nsentences": len(rows), "target": None, "net_input": inputs}

    def run() -> Any:
        torch.manual_seed(1)
        return models.generate(name, sample, strategy=_STRATEGIES[strategy])

    with fastgen.disabled():
        expected = _outcome(run)
    for tier in ("auto", "fast"):
        with fastgen.configured(tier=tier):
            assert _outcome(run) == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_a_prefix_of_another_number_of_rows(rows: int) -> None:
    def run() -> Any:
        return models.generate("post-norm", models.batch(), prefix=torch.arange(5, 5 + rows)[:, None])

    with fastgen.disabled():
        expected = _outcome(run)
    assert expected[0] in (IndexError, RuntimeError)
    for tier in ("auto", "fast"):
        with fastgen.configured(tier=tier):
            assert _outcome(run) == expected
