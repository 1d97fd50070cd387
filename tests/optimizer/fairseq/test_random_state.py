"""The stream of random numbers: a seed gives the samples that it gives in stock, and the same state after the call."""

from __future__ import annotations

import copy
import functools
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.modules import LayerDropModuleList
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from fastgen.optimizer.fairseq.generate import continuous_batch
from fastgen.replay import statistics

SAMPLING = functools.partial(search.Sampling, sampling_topk=7)


def dropping(name: str, parts: tuple[str, ...] = ("encoder", "decoder"), kind: Any = LayerDropModuleList) -> Any:
    """A model that was trained with LayerDrop: fairseq's list of layers draws whenever it is iterated over."""
    model = copy.deepcopy(models.load(name))
    for part in parts:
        if hasattr(model, part):
            getattr(model, part).layers = kind(0.3, list(getattr(model, part).layers))
    return model.eval()


def compare(run: Any, tiers: tuple[str, ...] = ("auto", "fast"), **options: Any) -> None:
    """The same hypotheses and, after the call, the same random state; by the tree."""
    expected = judge.stock(run)
    state = torch.get_rng_state()
    for tier in tiers:
        with judge.configured(tier=tier, **options):
            result, calls = judge.ours(run, strict=False)
        assert calls[-1].tier == "compat", calls
        assert torch.equal(state, torch.get_rng_state()), "another number of random numbers was drawn"
        judge.assert_same(expected, result)


@pytest.mark.parametrize("setting", [{}, dict(replay="always"), dict(cache="k"), dict(packing="always")], ids=str)
@pytest.mark.parametrize("strategy", [None, SAMPLING], ids=["beams", "samples"])
@pytest.mark.parametrize("name", ["post-norm", "bart", "align"])
def test_layerdrop(name: str, strategy: Any, setting: dict[str, Any]) -> None:
    model, (sample, prefix) = dropping(name), models.staggered(5)
    compare(
        lambda: models.generate(model, sample, prefix=prefix, beam_size=3, max_len_b=12, strategy=strategy), **setting
    )
    assert not statistics.counts(model).captures


@pytest.mark.parametrize("beams", [1, 2])
def test_layerdrop_in_a_model_that_is_told_of_beams(beams: int) -> None:
    """A new generator goes over the layers of a BART only if there is more than one."""
    model = dropping("bart")
    compare(lambda: models.generate(model, models.batch(), beam_size=beams, strategy=SAMPLING))


@pytest.mark.parametrize("parts", [("encoder",), ("decoder",)], ids=str)
def test_layerdrop_in_one_part(parts: tuple[str, ...]) -> None:
    model, sample = dropping("pre-norm", parts), models.batch()
    compare(lambda: models.generate(model, sample, strategy=SAMPLING))


@pytest.mark.parametrize("strategy", [None, SAMPLING], ids=["beams", "samples"])
@pytest.mark.parametrize("replay", ["off", "always"])
def test_layerdrop_in_a_language_model(replay: str, strategy: Any) -> None:
    """Stock reads a prompt word by word, and draws for each."""
    model = dropping("lm")
    compare(lambda: models.prompted(model, strategy=strategy), replay=replay)


def test_layerdrop_in_a_language_model_that_is_fused_in() -> None:
    fused = dropping("lm")
    compare(lambda: models.generate(dropping("post-norm"), models.batch(), lm_model=fused, strategy=SAMPLING))


def test_layerdrop_in_an_ensemble() -> None:
    several = [dropping("post-norm"), models.load("learned", seed=1), dropping("post-norm")]
    compare(lambda: models.generate(several, models.batch(), strategy=SAMPLING))


@pytest.mark.parametrize("name", ["post-norm", "lm"])
@pytest.mark.parametrize("cache", ["auto", "k", "x"])
def test_nothing_else_draws(name: str, cache: str) -> None:
    """A plain model's steps are replayed, and its outputs looked at, with no random number."""
    model = copy.deepcopy(models.load(name))
    generated = models.prompted if name == "lm" else models.generate
    for _ in range(2):
        compare(lambda: generated(model, models.prompts() if name == "lm" else models.batch(), strategy=SAMPLING),
                tiers=("auto",), cache=cache, replay="always")  # fmt: skip


def test_a_list_of_layers_of_the_users() -> None:
    class Mine(LayerDropModuleList):
        def __iter__(self) -> Any:
            torch.rand(3)
            return iter(reversed([*super().__iter__()]))

    model = dropping("post-norm", ("decoder",), Mine)
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "its layers are held by Mine")
    model = dropping("post-norm", ("encoder",), Mine)
    compare(lambda: models.generate(model, models.batch(), strategy=SAMPLING), tiers=("auto",))


def test_a_list_of_layers_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = LayerDropModuleList.__iter__
    monkeypatch.setattr(LayerDropModuleList, "__iter__", lambda self: iterate(self))
    model = dropping("post-norm")
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "LayerDropModuleList has its own __iter__")


def test_layerdrop_is_not_refilled() -> None:
    """There steps of several samples are one."""
    generator = SequenceGenerator([dropping("post-norm")], models.dictionary())
    assert continuous_batch.unrefillable(generator) == "its layers draw random numbers in each step (LayerDrop)"


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With layers in a plain list nothing is drawn."""
    from fastgen.optimizer.fairseq.model import decoder

    monkeypatch.setattr(decoder, "with_layers", lambda part, layers: nn.ModuleList(layers))
    with pytest.raises(AssertionError, match="another number of random numbers"):
        compare(lambda: models.generate(dropping("post-norm"), models.batch(), strategy=SAMPLING))
