"""`verify=N`: of a model's searches every N-th is run by stock too, and a difference ends acceleration."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search

import fastgen
from fastgen import report
from fastgen.optimizer import verification
from fastgen.optimizer.fairseq import dispatch
from fastgen.optimizer.fairseq import verification as fairseq_verification
from fastgen.optimizer.fairseq.model.decoder import TreeEnsemble
from fastgen.optimizer.verification import DIFFERENT, GAP, NEAR_TIE, SAME, UNVERIFIED

SAMPLING = functools.partial(search.Sampling, sampling_topk=7)
DIVERSE = functools.partial(search.DiverseSiblingsSearch, diversity_rate=0.5)


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    verification.reset()
    yield
    verification.reset()


def shifted(monkeypatch: pytest.MonkeyPatch, by: float, token: int = 9) -> None:
    """Scores of steps over the tree are others."""
    step = TreeEnsemble.forward_decoder

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, weights = step(self, *args, **kwargs)
        scores = scores.clone()
        scores[:, token] += by
        return scores, weights

    monkeypatch.setattr(TreeEnsemble, "forward_decoder", wrong)


@pytest.mark.parametrize("strategy", [None, SAMPLING, DIVERSE], ids=["beams", "samples", "siblings"])
@pytest.mark.parametrize("tier", ["auto", "fast"])
@pytest.mark.parametrize("name", ["post-norm", "bart", "align"])
def test_equal(name: str, tier: str, strategy: Any) -> None:
    """One answer, one record, and the random stream where it would be."""
    model, (sample, prefix) = copy.deepcopy(models.load(name)), models.staggered(5)
    run = functools.partial(models.generate, model, sample, prefix=prefix, strategy=strategy)
    expected = judge.stock(run)
    stream = torch.get_rng_state()
    with fastgen.configured(verify=1, tier=tier):
        found, calls = judge.ours(run, strict=False)
    judge.assert_same(expected, found)
    assert torch.equal(torch.get_rng_state(), stream)
    assert len(calls) == 1 and calls[0].tier != "stock" and verification.counts() == {SAME: 1}


def test_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = copy.deepcopy(models.load("bart")), models.batch()
    run = functools.partial(models.generate, model, sample)
    expected = judge.stock(run)
    shifted(monkeypatch, 3.0)
    with fastgen.configured(verify=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
        with pytest.raises(AssertionError):
            judge.assert_same(expected, found)
        assert not caught
        judge.assert_same(expected, run())
        text = str(next(each.message for each in caught if "no longer accelerated" in str(each.message)))
        judge.assert_same(expected, run())  # by another generator of the same model
    assert "beam_size" in text and "fairseq: 0." in text
    assert not any(str(hypothesis["tokens"].tolist())[1:-1] in text for each in expected for hypothesis in each)
    assert report.calls()[-1].tier == "stock" and "verified" in str(report.calls()[-1].reason)
    assert verification.counts() == {DIFFERENT: 1}


def test_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted(monkeypatch, 0.001)
    model, sample = copy.deepcopy(models.load("bart")), models.batch()
    with fastgen.configured(verify=1), pytest.warns(RuntimeWarning, match="score"):
        for token in range(4, 20):
            shifted(monkeypatch, 0.001, token)
            models.generate(model, sample)


def test_a_near_tie_of_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word has a twin that is as good."""
    model, sample = copy.deepcopy(models.load("post-norm")), models.batch()
    with torch.no_grad():
        for embedding in {model.decoder.embed_tokens.weight, model.decoder.output_projection.weight}:
            embedding[5::2] = embedding[4:-1:2]
    for token in range(4, 14):
        shifted(monkeypatch, (-1) ** token * 2e-6, token)
    with fastgen.configured(verify=1):
        models.generate(model, sample)
    assert verification.counts() == {NEAR_TIE: 1}
    assert report.calls()[-1].tier != "stock"


@pytest.mark.parametrize("seed", [5, 6])
def test_draws_that_are_near_ties(seed: int) -> None:
    """With the noise of seed 5 as probabilities, each draw of that seed is a tie; the first step is not known."""
    stock, sentences, beams = SAMPLING(models.dictionary()), 3, 2
    stock.sampling_topk = -1
    torch.manual_seed(5)
    noise = torch.empty(sentences * beams, len(models.dictionary())).exponential_()
    lprobs = noise.view(sentences, beams, -1).log().log_softmax(-1)
    left, gaps = torch.tensor([0, 2, 3]), torch.full((4,), torch.inf)
    looking = fairseq_verification._Looking(stock, gaps)
    for step in (0, 1):
        arguments = (step, lprobs, torch.zeros(sentences, beams, 1), None, left)
        torch.manual_seed(seed)
        expected = stock.step(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
        torch.manual_seed(seed)
        found = looking.step(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert gaps[1].isinf() and (gaps.isinf().all() if step == 0 else gaps[left].isfinite().all())
    assert (gaps[left] < GAP).all() if seed == 5 else (gaps[left] > GAP).all()


def test_code_of_the_users_runs_once() -> None:
    calls: list[int] = []

    class Mine(search.BeamSearch):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().step(*args, **kwargs)

    run = functools.partial(models.generate, copy.deepcopy(models.load("bart")), models.batch(), strategy=Mine)
    judge.stock(run)
    count = len(calls)
    with fastgen.configured(verify=1):
        run()
    assert len(calls) == 2 * count and not verification.counts().get(SAME)


def test_a_filter_of_the_users() -> None:
    """The function of a constrained search is called as often as by stock, and the search is not compared."""
    calls: list[int] = []

    def allowed(batch: int, tokens: torch.Tensor) -> list[int]:
        calls.append(1)
        return list(range(4, 20))

    strategy = functools.partial(search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=allowed)
    run = functools.partial(models.generate, copy.deepcopy(models.load("bart")), models.batch(), strategy=strategy)
    expected = judge.stock(run)
    count = len(calls)
    with fastgen.configured(verify=1):
        judge.assert_same(expected, run())
    assert len(calls) == 2 * count and verification.counts() == {UNVERIFIED: 1}


def test_out_of_memory_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(models.generate, copy.deepcopy(models.load("bart")), models.batch())
    expected = judge.stock(run)
    mended = dispatch._mended

    def exhausted(request: Any) -> Any:
        view, sample = mended(request)
        if verification.config.current().verify and not verification._is_comparing.get():
            view.__dict__["max_len"] = _Exhausting()
        return view, sample

    class _Exhausting:
        def __sub__(self, other: int) -> int:
            if verification._is_comparing.get():
                raise MemoryError
            return 200

    monkeypatch.setattr(dispatch, "_mended", exhausted)
    with fastgen.configured(verify=1):
        judge.assert_same(expected, run())
    assert verification.counts() == {UNVERIFIED: 1}
