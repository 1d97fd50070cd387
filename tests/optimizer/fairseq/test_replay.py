"""Decode steps captured once and replayed, by a tape and as a CUDA graph does: the hypotheses stay the host's."""

from __future__ import annotations

import copy
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch

import fastgen
from fastgen.cache import tree
from fastgen.optimizer.fairseq.replay.steps import ReplayedSteps
from fastgen.replay import replayer, statistics

pytestmark = pytest.mark.usefixtures("recording")

LONG = dict(beam_size=4, min_len=12, max_len_b=12)


def _generated(name: str) -> Any:
    if name in models.LANGUAGE_MODELS:
        return lambda: models.prompted(name, beam_size=4, max_len_b=20, min_len=18)
    return lambda: models.generate(name, models.batch(), **LONG)


@pytest.mark.parametrize("name", [*models.TRANSLATORS, *models.LANGUAGE_MODELS])
def test_identical(name: str) -> None:
    model = models.load(name)
    before = copy.copy(statistics.counts(model))
    judge.compare(_generated(name))
    after = statistics.counts(model)
    assert after.captures > before.captures and after.replays >= before.replays + 8
    assert "steps replayed" in fastgen.status().replayed[type(model).__name__]


def test_sentences_leave() -> None:
    sample, prefix = models.staggered(17)
    for name in ("pre-norm", "bart", "prophetnet"):
        judge.compare(lambda name=name: models.generate(name, sample, prefix=prefix, beam_size=3, max_len_b=25))
        assert statistics.counts(models.load(name)).replays > 5


def test_slots_are_pruned_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FIRST_STEPS", 3)
    monkeypatch.setattr(replayer, "_PATIENCE", 1)
    judge.compare(lambda: models.generate("learned", models.batch([5, 9]), beam_size=3, max_len_b=40, min_len=40))
    counts = statistics.counts(models.load("learned"))
    assert counts.captures > 1 and counts.replays > 10


def test_ensembles() -> None:
    two = [models.load("post-norm"), models.load("learned", seed=1)]
    judge.compare(lambda: models.generate(two, models.batch(), **LONG))
    assert statistics.counts(two[0]).replays > 5


def test_one_sentence() -> None:
    for options in (dict(LONG, beam_size=1), dict(beam_size=5, max_len_b=1)):
        judge.compare(lambda options=options: models.generate("wmt", models.batch([7]), **options))


def test_settings() -> None:
    for setting, lengths, steps, are_replayed in (
        ("off", [5], 14, False),
        ("auto", [5], 14, True),
        ("auto", [5], 8, False),
        ("auto", [5, 5], 14, False),
        ("always", [5, 5], 8, True),
    ):
        statistics.release()
        fastgen.configure(replay=setting)
        judge.compare(lambda lengths=lengths, n=steps: models.generate("shared", models.batch(lengths), max_len_b=n))
        assert (statistics.counts(models.load("shared")).captures > 0) == are_replayed, (setting, lengths, steps)


def test_hooks_see_each_step() -> None:
    model, calls = copy.deepcopy(models.load("post-norm")), []
    handle = model.decoder.layers[0].fc1.register_forward_hook(lambda *_: calls.append(1))
    judge.compare(lambda: models.generate(model, models.batch(), **LONG))
    assert len(calls) == 3 * 13 and not statistics.counts(model).captures
    handle.remove()
    judge.compare(lambda: models.generate(model, models.batch(), **LONG))
    assert statistics.counts(model).captures


def test_positions_are_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first step's baked in, the hypotheses would be others."""
    call = ReplayedSteps.__call__

    def stuck(self: Any, tokens: torch.Tensor, *args: Any) -> Any:
        self._embed = [lambda *_, at=position, **__: at for position in self._positions] or self._embed
        return call(self, tokens, *args)

    monkeypatch.setattr(ReplayedSteps, "__call__", stuck)
    with pytest.raises(AssertionError):
        judge.compare(lambda: models.generate("post-norm", models.batch(), **LONG))


def test_autocast_sees_the_model() -> None:
    model = copy.deepcopy(models.load("post-norm"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        judge.ours(lambda: models.generate(model, models.batch(), **LONG))
    assert not statistics.counts(model).captures
