"""Our loop under the host's rules: it ran, sentences left, its steps were replayed; and a wrong rule would be seen."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from emulated_graph import Graph
from fairseq import search, sequence_generator

from fastgen.decoding import fairseq_beam_search
from fastgen.decoding.fairseq_beam_search import CollectingPolicy, FairseqBeamSearch
from fastgen.replay import replayer, statistics

DEVICE = torch.device("cpu")


def _staggered(name: str = "post-norm", beams: int = 3) -> Any:
    sample, prefix = models.staggered(17)
    return lambda: models.generate(name, sample, prefix=prefix, beam_size=beams, max_len_b=25)


def test_sentences_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    evict = FairseqBeamSearch.evict

    def noting(self: FairseqBeamSearch, finished_mask: torch.Tensor) -> torch.Tensor:
        left.append(int(finished_mask.sum()))
        return evict(self, finished_mask)

    monkeypatch.setattr(FairseqBeamSearch, "evict", noting)
    for beams in (1, 3, 5):
        left.clear()
        judge.compare(_staggered(beams=beams), is_fast=True)
        assert len(left) > 5 and sum(left) < 17


def test_nobody_leaves_and_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where sentences that are done go on for a while: what has ended stays as it is."""
    monkeypatch.setattr(FairseqBeamSearch, "num_finished", lambda self: 0)
    judge.compare(_staggered(), is_fast=True)


@pytest.mark.usefixtures("recording")
def test_steps_of_the_search_are_replayed(recording: type[replayer.GraphBackend]) -> None:
    for name, options in (("post-norm", dict(beam_size=4)), ("lm", dict(beam_size=3))):
        model = models.load(name)
        run = partial(models.prompted, name) if name == "lm" else partial(models.generate, name, models.batch())
        with judge.configured(tier="fast"):
            before = copy.copy(statistics.counts(model))
            judge.ours(partial(run, min_len=12, max_len_b=20, **options))
            after = statistics.counts(model)
        assert after.captures - before.captures == 2, "the model's step, and the search's"
        assert after.replays - before.replays > 16


@pytest.mark.usefixtures("recording")
def test_the_end_is_learnt_a_step_late(recording: type[replayer.GraphBackend]) -> None:
    """With nothing that waits for a value, sentences leave and the search ends a step after they could."""
    judge.compare(_staggered(), is_fast=True)
    assert recording is not Graph or statistics.counts(models.load("post-norm")).captures > 1


def _level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairseqBeamSearch, "level", lambda self, sentences: None)


def _beyond_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates beyond the best M end hypotheses too."""
    take = FairseqBeamSearch._take

    def taken(self: FairseqBeamSearch, scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> Any:
        first = (~tokens.eq(self._end)).long().argsort(dim=1, stable=True)  # the ends before all others
        return take(self, scores.gather(1, first), tokens.gather(1, first), parents.gather(1, first))

    monkeypatch.setattr(FairseqBeamSearch, "_take", taken)


def _penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectingPolicy, "divisor", lambda self, step: 1.0)


def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    hypothesis = fairseq_beam_search._hypothesis

    def of_the_first(state: Any, *args: Any) -> Any:
        state.ended_path.zero_()
        return hypothesis(state, *args)

    monkeypatch.setattr(fairseq_beam_search, "_hypothesis", of_the_first)


@pytest.mark.parametrize("mutate", [_level, _beyond_the_best, _penalty, _path])
def test_negative_controls(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_staggered(beams=beams) for beams in (3, 5)]
    runs += [lambda name=name: models.generate(name, models.batch(), beam_size=5) for name in models.TRANSLATORS]
    for run in runs:
        judge.compare(run)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for run in runs:
            judge.compare(run)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adaptive", "post-norm"])
def test_scores_in_the_models_dtype(name: str, dtype: torch.dtype) -> None:
    """An adaptive softmax returns its own dtype, another one float32."""
    model = copy.deepcopy(models.load(name)).to(dtype)
    run = partial(models.generate, model, models.batch(), beam_size=3, len_penalty=0.7)
    results = []
    for tier in ("compat", "fast"):
        with judge.configured(tier=tier):
            result, (call,) = judge.ours(run)
        assert call.tier == tier
        results.append(result)
    judge.assert_same(*results)
    expected = {hypothesis["score"].dtype for hypotheses in judge.stock(run) for hypothesis in hypotheses}
    assert {hypothesis["score"].dtype for hypotheses in results[1] for hypothesis in hypotheses} == expected


def test_constraints_are_refused_as_the_host_does() -> None:
    with judge.configured(tier="fast"), pytest.raises(NotImplementedError, match="constraints"):
        judge.ours(lambda: models.generate("bart", models.batch(), constraints=torch.ones(4, 3).long()), strict=False)


@pytest.mark.parametrize(
    ("owner", "name"), [(sequence_generator.SequenceGenerator, "finalize_hypos"), (search.BeamSearch, "step")], ids=str
)
def test_rules_that_are_replaced_at_any_time(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With something that bears their name: the host's loop honours it, and so do we."""
    rule, calls = getattr(owner, name), []

    @functools.wraps(rule)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return rule(*args, **kwargs)

    monkeypatch.setattr(owner, name, replaced)
    run = partial(models.generate, "bart", models.batch())
    judge.stock(run)
    wanted = len(calls)
    for tier in ("compat", "fast"):
        calls.clear()
        with judge.configured(tier=tier):
            judge.ours(run, strict=False)
        assert len(calls) == wanted


def test_a_search_that_stops_at_the_maximal_length() -> None:
    def strategy(words: Any) -> Any:
        made = search.BeamSearch(words)
        made.stop_on_max_len = True
        return made

    judge.compare(partial(models.generate, "bart", models.batch(), strategy=strategy), is_fast=False)


def _search(batch: int, beams: int, length: int) -> FairseqBeamSearch:
    return FairseqBeamSearch(batch, beams, CollectingPolicy(1.0, True, length), start=2, end=2, pad=1, device=DEVICE)


def test_nothing_can_end() -> None:
    """The host's loop asserts that at the maximal length every sentence ends."""
    search = _search(2, 2, 1)
    log_probs = torch.randn(4, 9).log_softmax(-1)
    log_probs[:, 2] = -torch.inf
    for _ in range(2):
        search.choose(log_probs.clone())
    assert search.done
    with pytest.raises(AssertionError, match="1 < 1"):
        search.result()


def test_fewer_hypotheses_than_beams() -> None:
    """At the maximal length a sentence ends with what it has."""
    search = _search(1, 3, 0)
    log_probs = torch.full((3, 9), -torch.inf)
    log_probs[:, 2] = -0.5
    search.choose(log_probs)
    (hypotheses,) = search.result()
    assert search.done and [hypothesis["tokens"].tolist() for hypothesis in hypotheses] == [[2]]
    assert float(hypotheses[0]["score"]) == -0.5 and hypotheses[0]["attention"].numel() == 0
