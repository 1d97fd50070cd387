"""Every architecture of fairseq that the tree knows: hypotheses, scores and attention are stock's."""

from __future__ import annotations

from typing import Any

import fairseq_models as models
import judge
import pytest
import torch

BEAMS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_translators(name: str, left: bool) -> None:
    sample = models.batch(left=left)
    for beams in BEAMS:
        expected = judge.compare(lambda beams=beams: models.generate(name, sample, beam_size=beams), is_fast=True)
        assert [len(hypotheses) for hypotheses in expected] == [beams] * 4
        attention = expected[0][0]["attention"]
        assert (attention.numel() > 0) == (name != "no-cross"), "the host returns attention"


@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_one_sentence(name: str) -> None:
    for length in (1, 11):
        judge.compare(lambda length=length: models.generate(name, models.batch([length])))


@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_language_models(name: str) -> None:
    for beams in BEAMS:
        judge.compare(lambda beams=beams: models.prompted(name, beam_size=beams, max_len_b=20))


@pytest.mark.parametrize("lengths", [(1,), (9,), (3, 8, 5), (2, 1)], ids=str)
@pytest.mark.parametrize("name", models.LANGUAGE_MODELS)
def test_ragged_prompts(name: str, lengths: tuple[int, ...]) -> None:
    judge.compare(lambda: models.prompted(name, models.prompts(lengths), beam_size=3, max_len_b=16))


@pytest.mark.parametrize("name", ["pre-norm", "post-norm", "bart", "align", "prophetnet"])
def test_sentences_leave(name: str) -> None:
    """Sentences end at different steps, some because a prefix says so, and the others go on."""
    sample, prefix = models.staggered(17)
    expected = judge.compare(
        lambda: models.generate(name, sample, prefix=prefix, beam_size=3, max_len_b=25), is_fast=True
    )
    ends = {max(len(hypothesis["tokens"]) for hypothesis in hypotheses) for hypotheses in expected}
    assert len(ends) > 9, "all sentences end together: nothing ever leaves"


def test_ensembles() -> None:
    sample = models.batch()
    two = [models.load("post-norm"), models.load("post-norm", seed=1)]
    judge.compare(lambda: models.generate(two, sample))
    judge.compare(lambda: models.generate([models.load("pre-norm"), models.load("learned"), *two], sample, beam_size=5))
    judge.compare(lambda: models.prompted([models.load("lm"), models.load("lm", seed=1)], max_len_b=12))


def test_languages() -> None:
    """As m2m and mbart are asked: the target language is the first token, or the first of the prefix."""
    language = 7
    prefix = torch.full((4, 1), language)
    for name in ("m2m", "mbart"):
        judge.compare(lambda name=name: models.generate(name, models.batch(), bos=language))
        expected = judge.compare(lambda name=name: models.generate(name, models.batch(), prefix=prefix))
        assert all(hypothesis["tokens"][0] == language for hypotheses in expected for hypothesis in hypotheses)


def test_long_outputs_outgrow_the_first_buffers() -> None:
    """More steps than are allocated at first, and prompts as long."""
    sample, options = models.batch([5, 9]), dict(beam_size=3, max_len_b=200, min_len=50)
    for name in ("post-norm", "learned", "prophetnet"):
        expected = judge.compare(lambda name=name: models.generate(name, sample, **options))
        assert len(expected[0][0]["tokens"]) > 50
    judge.compare(lambda: models.prompted("lm", models.prompts([40, 40]), beam_size=3, max_len_b=60, min_len=55))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("lightconv", "Transformer decoder"), ("fconv", "Transformer decoder"), ("lstm", "Transformer decoder")],
)
def test_other_architectures_fall_back(name: str, reason: str) -> None:
    sample = models.batch([12, 9, 7, 5])  # lstm wants the longest first
    judge.compare_fallback(lambda: models.generate(name, sample), reason)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["post-norm", "bart", "prophetnet"])
def test_half_precision_is_as_good_as_stock(name: str, dtype: torch.dtype) -> None:
    """Forced along one path, the error of the scores is at most twice stock's."""
    import copy

    model, sample = models.load(name), models.batch([8, 3, 5])
    prefix = torch.randint(4, 4 + models.WORDS, (3, 10), generator=torch.Generator().manual_seed(0))

    def run(model: Any) -> Any:
        return models.generate(model, sample, prefix=prefix, beam_size=2, max_len_b=10)

    def scores(hypotheses: Any) -> torch.Tensor:
        return torch.stack([sentence[0]["positional_scores"].double() for sentence in hypotheses])

    half = copy.deepcopy(model).to(dtype)
    reference = scores(judge.stock(lambda: run(model)))
    stock = scores(judge.stock(lambda: run(half)))
    output, calls = judge.ours(lambda: run(half))
    judge.assert_over_the_tree(calls)
    error, allowed = ((side - reference).abs().mean() for side in (scores(output), stock))
    assert 0 < error <= 2 * allowed
