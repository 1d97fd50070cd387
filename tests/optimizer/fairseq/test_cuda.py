"""On a GPU: the hypotheses are those that stock finds there, with steps as CUDA graphs and without."""

from __future__ import annotations

import copy
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import utils

import fastgen
from fastgen.replay import statistics

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[False, True], ids=["steps", "graphs"])
def graphs(request: pytest.FixtureRequest) -> bool:
    fastgen.configure(cuda_graphs=request.param)
    return bool(request.param)


def _compare(run: Any) -> None:
    """The whole search is fastgen's, as it is by default on a GPU, or the host's loop over the tree."""
    expected = judge.stock(run)
    for tier in ("auto", "compat"):
        with judge.configured(tier=tier):
            result, calls = judge.ours(run)
        assert {call.tier for call in calls} <= {"fast", "compat"} and all(call.cache_bytes for call in calls), calls
        judge.assert_same(expected, result)


def _model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(models.load(name)).to("cuda", dtype)


@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_translators(name: str, graphs: bool) -> None:
    model = _model(name)
    for left in (True, False):
        sample = utils.move_to_cuda(models.batch(left=left))
        for options in (
            dict(beam_size=4),
            dict(beam_size=3, len_penalty=2.0, min_len=6),
            dict(beam_size=1, max_len_b=30),
        ):
            _compare(lambda sample=sample, options=options: models.generate(model, sample, **options))
    assert not graphs or statistics.counts(model).replays > 8, fastgen.status().replayed


@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_language_models(name: str, graphs: bool) -> None:
    model, sample = _model(name), utils.move_to_cuda(models.prompts((3, 8, 5)))
    _compare(lambda: models.prompted(model, sample, beam_size=4, max_len_b=20, min_len=18))
    assert not graphs or statistics.counts(model).replays > 8, fastgen.status().replayed


@pytest.mark.parametrize("name", ["pre-norm", "bart", "prophetnet"])
def test_sentences_leave(name: str, graphs: bool) -> None:
    model, (sample, prefix) = _model(name), models.staggered(17)
    sample, prefix = utils.move_to_cuda(sample), prefix.cuda()
    _compare(lambda: models.generate(model, sample, prefix=prefix, beam_size=3, max_len_b=25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["pre-norm", "bart", "prophetnet"])
def test_half_precision_is_as_good_as_stock(name: str, dtype: torch.dtype, graphs: bool) -> None:
    """Scores of the tokens that a prefix forces are at most twice as far from those in float64 as stock's."""
    sample = utils.move_to_cuda(models.batch([9, 9, 9]))
    prefix = torch.randint(4, 4 + models.WORDS, (3, 12), generator=torch.Generator().manual_seed(1)).cuda()

    def scores(dtype: torch.dtype, run: Any) -> torch.Tensor:
        model = _model(name, dtype)
        found = run(lambda: models.generate(model, sample, prefix=prefix, beam_size=3, max_len_b=12))
        return torch.stack([hypotheses[0]["positional_scores"][:12].double() for hypotheses in found])

    exact = scores(torch.float64, judge.stock)
    mine, theirs = ((scores(dtype, run) - exact).abs().max() for run in (lambda job: judge.ours(job)[0], judge.stock))
    assert mine <= 2 * theirs, (mine, theirs)
