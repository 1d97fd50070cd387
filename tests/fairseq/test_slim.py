"""Slim caches: hypotheses, scores and attention are stock's, and what is stored is what was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import judge
import models
import pytest
from test_refill import assert_same, each, refilled, samples

from fastgen import report
from fastgen.cache.slim import Slim
from fastgen.decoding import recordings


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
            assert_stored("x" if name == "no-cross" else "x+e")


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


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("name", ["post-norm", "bart"])
def test_recorded(name: str) -> None:
    """A later call puts its source where the recording looks for it."""
    model = models.load(name, seed=7)
    for seed in range(3):
        sample = models.batch((9, 7), seed=seed)
        judge.compare(lambda sample=sample: models.generate([model], sample, beam_size=3, max_len_b=20))
        assert recordings.count(model) >= 1
    assert_stored("x+e")


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
    stored = Slim.stored
    monkeypatch.setattr(Slim, "stored", lambda self, inputs: stored(self, inputs).flip(2))
    with pytest.raises(AssertionError):
        judge.compare(lambda: models.generate("post-norm", models.batch(), beam_size=3))
