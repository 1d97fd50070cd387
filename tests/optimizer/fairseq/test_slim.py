"""Slim caches: hypotheses, scores and attention are stock's, and what is stored is what was asked for."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator
from joined_samples import assert_same, each, refilled, samples

import fastgen
from fastgen import report
from fastgen.cache.slim.table import Inspection
from fastgen.optimizer.fairseq.model.attention import Shared
from fastgen.replay import store


@pytest.fixture(autouse=True)
def slim_caches() -> Iterator[None]:
    with judge.configured(cache="x"):
        yield


def assert_stored(kind: str) -> None:
    assert {call.cache for call in report.calls()} == {kind}, report.calls()


@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_translators(name: str) -> None:
    for beams in (1, 3, 5):
        for left in (True, False):
            judge.compare(lambda b=beams, le=left: models.generate(name, models.batch(left=le), beam_size=b))
            assert_stored({"no-cross": "x", "prophetnet": "e+kv"}.get(name, "x+e"))


@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_language_models(name: str) -> None:
    for beams in (1, 4):
        judge.compare(lambda beams=beams: models.prompted(name, beam_size=beams, max_len_b=20))
        assert_stored("x")


def test_ensembles() -> None:
    two = [models.load("post-norm"), models.load("post-norm", seed=1)]
    judge.compare(lambda: models.generate(two, models.batch()))
    assert_stored("x+e")


@pytest.mark.parametrize("name", ["post-norm", "bart", "align"])
def test_sentences_leave(name: str) -> None:
    sample, prefix = models.staggered(17)
    judge.compare(lambda: models.generate(name, sample, prefix=prefix, beam_size=3, max_len_b=25))
    assert_stored("x+e")


@pytest.mark.parametrize("name", ["post-norm", "align"])
def test_refilled(name: str) -> None:
    given = samples()
    assert_same(each(name, given), refilled(name, given))
    assert_stored("x+e")


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("lost", [(0,), (0, 1, 2, 3)], ids=str)
def test_sentences_without_a_hypothesis(lost: tuple[int, ...], kind: str) -> None:
    """A search among outputs that come to no end finds none, so there is none to look at."""

    def allowed(sentence: int, tokens: torch.Tensor) -> list[int]:
        return [*range(4, 20), *(() if int(sentence) in lost else (models.EOS,))]

    strategy = functools.partial(search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=allowed)
    model = copy.deepcopy(models.load("post-norm"))
    with judge.configured(cache=kind):
        found = judge.compare(lambda: models.generate(model, models.batch(), strategy=strategy, max_len_b=5))
    assert [number for number, hypotheses in enumerate(found) if not hypotheses] == [*lost]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("name", ["post-norm", "bart"])
def test_recorded(name: str) -> None:
    """A later call puts its source where the recording looks for it."""
    model = models.load(name, seed=7)
    for seed in range(3):
        sample = models.batch((9, 7), seed=seed)
        judge.compare(lambda sample=sample: models.generate([model], sample, beam_size=3, max_len_b=20))
        assert store.count(model) >= 1
    assert_stored("x+e")


# ---------------------------------------------------------------------------------------------- keys or values alone
def well_conditioned(name: str, seed: int, smallest: float = 1.0) -> Any:
    """A model whose keys and values are projected by weights with singular values down to `smallest`."""
    model = models.load(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.decoder.layers:
        for module in filter(None, (layer.self_attn, layer.encoder_attn)):
            for projection in (module.k_proj, module.v_proj):
                weight = projection.weight
                sides = [torch.linalg.qr(torch.randn(32, 32, generator=generator).double())[0] for _ in range(2)]
                new = sides[0] * torch.logspace(0, math.log10(smallest), 32).double() @ sides[1]
                with torch.no_grad():
                    weight.copy_(new * weight.std() / new.std())
    return model


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "bart", "align", "lm"])
def test_one_alone(name: str, kind: str) -> None:
    """From the second call on: the first one's output is what layers are judged on."""
    model = well_conditioned(name, 11)
    with judge.configured(cache=kind):
        for number in range(3):
            if name == "lm":
                judge.compare(lambda: models.prompted([model], beam_size=3, max_len_b=20))
            else:
                judge.compare(lambda n=number: models.generate([model], models.batch(seed=n), beam_size=4))
            if number:
                assert_stored(kind)


def test_one_alone_of_an_ensemble() -> None:
    two = [well_conditioned("post-norm", 11), well_conditioned("post-norm", 12)]
    with judge.configured(cache="k"):
        for _ in range(2):
            judge.compare(lambda: models.generate(two, models.batch()))
    assert_stored("k")


def test_one_alone_as_sentences_leave() -> None:
    model = well_conditioned("post-norm", 13)
    sample, prefix = models.staggered(17)
    with judge.configured(cache="k"):
        for _ in range(2):
            judge.compare(lambda: models.generate([model], sample, prefix=prefix, beam_size=3, max_len_b=25))
    assert_stored("k")


@pytest.mark.parametrize("kind", ["k", "v"])
def test_never_a_wrong_hypothesis(kind: str) -> None:
    """From no condition at all to a hopeless one: what is not exact enough is refused."""
    stored = []
    for exponent in range(10):
        model = well_conditioned("post-norm", 20 + exponent, 10.0**-exponent)
        with judge.configured(cache=kind):
            for _ in range(2):
                judge.compare(lambda model=model: models.generate([model], models.batch(), beam_size=4))
        stored.append({call.cache for call in report.calls()})
        if stored[-1] != {kind}:
            assert "its attention errs by" in report.calls()[-1].plan
    assert stored[0] == {kind} and stored[-1] == {"kv"}


@pytest.mark.usefixtures("recording")
def test_a_recording_is_of_one_kind() -> None:
    model = well_conditioned("post-norm", 14)
    for kind in ("x", "k", "k", "v", "v", "k", "x"):
        with judge.configured(cache=kind):
            judge.compare(lambda: models.generate([model], models.batch((9, 7)), beam_size=3, max_len_b=20))


def test_inspect() -> None:
    def table(*models_: Any, **options: Any) -> Inspection:
        generator = SequenceGenerator(list(models_), models.dictionary(), beam_size=3, max_len_b=10, **options)
        found = fastgen.inspect(generator, models.batch((5, 9, 7)))
        assert isinstance(found, Inspection)
        return found

    found = table(well_conditioned("post-norm", 11))
    assert [layer.is_cross_attn for layer in found.layers] == [False, True] * 3
    for layer in found.layers:
        assert all(verdict.reason is None and verdict.error is not None for verdict in layer.verdicts.values())
        assert layer.verdicts["k"].condition == pytest.approx(1, rel=1e-3)
    assert "decoder.layers.1.encoder_attn" in str(found) and "refused" not in str(found)
    two = table(well_conditioned("post-norm", 11), well_conditioned("post-norm", 12, 1e-9))
    lines = str(two).splitlines()
    assert [("refused" in line) for line in lines if "layers" in line] == [False] * 6 + [True] * 6
    generator = SequenceGenerator([models.load("post-norm")], models.dictionary())
    for sample, reason in (({"net_input": {}}, "the batch is empty"), ({}, "without net_input")):
        with pytest.raises(ValueError, match=reason):
            fastgen.inspect(generator, sample)
    with pytest.raises(ValueError, match=r"inspect\(generator, sample\)"):
        fastgen.inspect(models.load("post-norm"), {})


def test_inspect_reads_a_language_models_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = well_conditioned("lm", 11)
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=14)
    with judge.configured(strict=True, tier="fast"):
        found = fastgen.inspect(generator, models.prompts())
    assert len(found.layers) == len(model.decoder.layers) and "refused" not in str(found)
    model.decoder.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    assert "something else than plain linear layers" in str(fastgen.inspect(generator, models.prompts()))


def test_edits_that_leave_no_trace() -> None:
    model = well_conditioned("post-norm", 15)
    with judge.configured(cache="k"):
        for _ in range(4):
            judge.compare(lambda: models.generate([model], models.batch(), beam_size=3))
            for layer in model.decoder.layers:
                for module in (layer.self_attn, layer.encoder_attn):
                    module.k_proj.weight.data.mul_(1.3)
                    module.v_proj.weight.data.mul_(-0.7)


def test_fewer_bytes() -> None:
    """Three layers share one source, and a layer's input is half of its keys and values."""
    taken = {}
    for cache in ("kv", "x"):
        with judge.configured(cache=cache):
            _, calls = judge.ours(lambda: models.generate("post-norm", models.batch((40,)), beam_size=2, max_len_b=9))
        taken[calls[-1].cache] = calls[-1].cache_bytes
    assert taken.keys() == {"kv", "x+e"}
    assert taken["x+e"] <= taken["kv"] / 2


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_a_watched_projection_keeps_its_layers_cache(projection: str) -> None:
    model = models.load("post-norm", seed=5)
    seen: list[int] = []
    layer = getattr(model.decoder.layers[1].self_attn, projection)
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(1))
    try:
        judge.compare(lambda: models.generate([model], models.batch(), beam_size=3))
    finally:
        handle.remove()
    assert seen
    assert_stored("x+e+kv")


def test_a_wrong_latent_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were these tests blind to what is stored, they would pass with anything."""
    latent = Shared.latent
    monkeypatch.setattr(Shared, "latent", lambda self, source: latent(self, source).flip(2))
    with pytest.raises(AssertionError):
        judge.compare(lambda: models.generate("post-norm", models.batch(), beam_size=3))
