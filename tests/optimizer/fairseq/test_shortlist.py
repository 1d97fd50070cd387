"""The host's loop on the best tokens of each row: what it chooses is what it would choose among all."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.models import FairseqDecoder

from fastgen import ops
from fastgen.optimizer.fairseq.generate import shortlist
from fastgen.optimizer.fairseq.generate.shortlist import Shortlist

pytestmark = pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="needs the native operators")


@pytest.fixture(autouse=True)
def _hosts_loop() -> Iterator[None]:
    """Ours finds the best tokens in another way."""
    with judge.configured(tier="compat"):
        yield


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that fastgen takes on the best tokens or might have, whether it did."""
    steps: list[bool] = []
    stock = Shortlist.step

    def step(self: Shortlist, *args: Any, **kwargs: Any) -> Any:
        before = self.steps
        found = stock(self, *args, **kwargs)
        steps.append(self.steps > before)
        return found

    monkeypatch.setattr(Shortlist, "step", step)
    return steps


def _unshortened(run: judge.Run) -> judge.Hypotheses:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortlist, "_MOST_SPECIAL", 0)
        return judge.ours(run)[0]


@pytest.mark.parametrize("beams", [1, 4, 16])
@pytest.mark.parametrize("name", ["post-norm", "shared", "bart", "m2m", "align", "lm"])
def test_steps_are_shortened(name: str, beams: int, shortened: list[bool]) -> None:
    judge.compare(lambda: models.generate(name, models.batch(), beam_size=beams, min_len=3))
    # At the maximal length all but the end are equal; early on 16 beams have fewer live ones.
    assert sum(shortened) >= 0.6 * len(shortened) and len(shortened) > 5


@pytest.mark.parametrize(
    "option", ["unk_penalty", "no_repeat_ngram_size", "match_source_len", "temperature", "min_len"]
)
def test_options(option: str, shortened: list[bool]) -> None:
    value = {
        "unk_penalty": -2.5,
        "no_repeat_ngram_size": 2,
        "match_source_len": True,
        "temperature": 1.7,
        "min_len": 12,
    }
    for name in ("pre-norm", "lm"):
        options = {option: value[option]}
        if option == "no_repeat_ngram_size":  # stock bans nothing on a CPU: the reference is ours on all tokens
            expected = _unshortened(lambda name=name, options=options: models.generate(name, models.batch(), **options))
            assert not shortened
            result, _ = judge.ours(lambda name=name, options=options: models.generate(name, models.batch(), **options))
            judge.assert_same(expected, result)
        else:
            judge.compare(lambda name=name, options=options: models.generate(name, models.batch(), **options))
        assert any(shortened)
        shortened.clear()


def test_ngrams_and_ties(shortened: list[bool]) -> None:
    """With so few words, bans leave too few tokens: the search is the host's on all of them."""
    options = dict(no_repeat_ngram_size=1, beam_size=8, max_len_b=36, min_len=30)
    expected = _unshortened(lambda: models.generate("post-norm", models.batch(), **options))
    result, _ = judge.ours(lambda: models.generate("post-norm", models.batch(), **options))
    judge.assert_same(expected, result)
    assert any(shortened) and not all(shortened)


def test_a_prefix_may_be_any_tokens(shortened: list[bool]) -> None:
    prefix = torch.tensor([[5, 6], [33, 1], [40, 39], [7, 1]])
    judge.compare(lambda: models.generate("bart", models.batch(), prefix=prefix))
    assert any(shortened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beams", [1, 4, 16])
def test_a_prompt_has_one_token_a_step(beams: int, dtype: torch.dtype, shortened: list[bool]) -> None:
    model = copy.deepcopy(models.load("lm")).to(dtype)
    run = functools.partial(models.prompted, model, models.prompts((9, 9, 9)), beam_size=beams, max_len_b=20)
    if dtype == torch.float32:
        judge.compare(run)
    else:  # rounding makes other texts than stock's
        judge.assert_same(_unshortened(run), judge.ours(run)[0], exactly=True)
    assert all(shortened[:9]) and not shortened[9]  # there any token may come


@pytest.mark.parametrize(
    ("lengths", "forced"),
    [((9, 4, 7), 4), ((30, 30), 14), ((5,), 5)],
    ids=["ragged", "longer than the output", "one sentence"],
)
def test_as_far_as_all_prompts_go(lengths: tuple[int, ...], forced: int, shortened: list[bool]) -> None:
    judge.compare(lambda: models.prompted("lm", models.prompts(lengths)))
    assert all(shortened[:forced]) and not any(shortened[forced : max(forced + 1, *lengths)])


def test_prompts_that_need_the_scores_of_all(shortened: list[bool]) -> None:
    """An unknown word, whose score the loop changes, and bans of n-grams, which may hit a token of the prompt."""
    sample = models.prompts()
    tokens = sample["net_input"]["src_tokens"]
    tokens[1, 2] = 3
    judge.compare(lambda: models.prompted("lm", sample, unk_penalty=2.5))
    assert shortened[:6] == [True, True, False, True, True, True]
    tokens[0, 3:5] = tokens[0, :2]
    shortened.clear()
    run = functools.partial(models.prompted, "lm", sample, no_repeat_ngram_size=2)
    expected = _unshortened(run)
    judge.assert_same(expected, judge.ours(run)[0])
    assert not any(shortened[:6])


def test_equal_scores_are_the_hosts_to_order(shortened: list[bool]) -> None:
    model = copy.deepcopy(models.load("post-norm"))
    with torch.no_grad():
        model.decoder.output_projection.weight[20:41] = model.decoder.output_projection.weight[4:25].clone()
    judge.compare(lambda: models.generate(model, models.batch()))
    assert not all(shortened)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers(value: float, shortened: list[bool]) -> None:
    """What a word's weight makes of the sums, its own and those of all, is the host's."""
    model = copy.deepcopy(models.load("post-norm"))
    layer = torch.nn.Linear(32, 41)
    with torch.no_grad():
        layer.weight.copy_(model.decoder.output_projection.weight)
        layer.bias.zero_()
        layer.bias[17] = value
    model.decoder.output_projection = layer

    def run() -> Any:
        return models.generate(model, models.batch())

    if value == -math.inf:
        judge.compare(run)
        assert any(shortened)
        return
    for side in (judge.stock, judge.ours):  # no score is a number then, and no sentence ends
        with pytest.raises(AssertionError, match="14 < 14"):
            side(run)
    assert shortened and not any(shortened)


def test_what_needs_the_scores_of_all(shortened: list[bool]) -> None:
    """Averages and sums of several models, other searches and softmaxes, dictionaries that are hardly longer."""
    strategy = lambda words: search.DiverseBeamSearch(words, num_groups=2, diversity_strength=0.5)  # noqa: E731
    for names, options in [
        (["post-norm", "pre-norm"], {}),
        ("post-norm", dict(lm_model=models.load("lm"))),
        ("post-norm", dict(strategy=strategy)),
        ("post-norm", dict(tokens_to_suppress=("w3",))),
        ("post-norm", dict(beam_size=20, max_len_b=5)),
        ("adaptive", {}),
    ]:
        judge.compare(lambda names=names, options=options: models.generate(names, models.batch(), **options))
    assert not shortened


def test_half_precision(shortened: list[bool]) -> None:
    model = copy.deepcopy(models.load("post-norm")).bfloat16()

    def run() -> Any:
        return models.generate(model, models.batch())

    judge.assert_same(_unshortened(run), judge.ours(run)[0], exactly=True)
    assert shortened and not any(shortened)


@pytest.mark.parametrize("beams", [17, 18, 19])
def test_as_many_columns_as_words(beams: int, shortened: list[bool]) -> None:
    """The list's width, up to 4 + 2M + 1 + 4 columns, says nothing about what the columns are."""

    def run() -> Any:
        return models.generate("post-norm", models.batch(), beam_size=beams, no_repeat_ngram_size=2)

    judge.assert_same(_unshortened(run), judge.ours(run)[0])
    assert any(shortened) == (beams < 19)


@pytest.mark.parametrize("options", [{}, dict(no_repeat_ngram_size=3)])
@pytest.mark.parametrize("offset", [5e3, 1e5])
def test_large_logits(offset: float, options: dict[str, Any], shortened: list[bool]) -> None:
    """The end's score has as many digits as the others."""
    model = copy.deepcopy(models.load("post-norm"))
    layer = torch.nn.Linear(32, 41)
    with torch.no_grad():
        layer.weight.copy_(model.decoder.output_projection.weight)
        layer.bias.fill_(offset)
    model.decoder.output_projection = layer

    def run() -> Any:
        return models.generate(model, models.batch(), **options)

    judge.assert_same(_unshortened(run) if options else judge.stock(run), judge.ours(run)[0])
    assert any(shortened)


def test_a_step_of_the_users(shortened: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A search, or a softmax, that somebody has replaced is called."""

    def without_seven(self: Any, step: int, lprobs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lprobs[:, :, 7] = -math.inf
        return stock(self, step, lprobs, *args, **kwargs)

    def strategy(words: Any) -> Any:
        made = search.BeamSearch(words)
        made.step = without_seven.__get__(made)
        return made

    stock = search.BeamSearch.step
    judge.compare(lambda: models.generate("post-norm", models.batch(), strategy=strategy))
    with monkeypatch.context() as patch:
        patch.setattr(search.BeamSearch, "step", without_seven)
        judge.compare(lambda: models.generate("post-norm", models.batch()))
    normalised = FairseqDecoder.get_normalized_probs
    patched = lambda *args, **kwargs: normalised(*args, **kwargs) * 0.5  # noqa: E731
    monkeypatch.setattr(FairseqDecoder, "get_normalized_probs", patched)
    judge.compare(lambda: models.generate("lm", models.batch()))
    assert not shortened


def test_a_decoder_wider_than_the_dictionary() -> None:
    model = copy.deepcopy(models.load("post-norm"))
    model.decoder.output_projection = torch.nn.Linear(32, 48, bias=False)
    for side in (judge.stock, judge.ours):
        with pytest.raises(RuntimeError, match="shape"):
            side(lambda: models.generate(model, models.batch()))


def test_nothing_outlives_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and keys go with the call, not when garbage is collected."""
    made: list[weakref.ref[Any]] = []
    stock = Shortlist.__init__

    def noted(self: Shortlist, request: Any, view: Any) -> None:
        stock(self, request, view)
        made.extend([weakref.ref(self), weakref.ref(view)])

    monkeypatch.setattr(Shortlist, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        judge.ours(lambda: models.generate("post-norm", models.batch(), no_repeat_ngram_size=2))
        assert made and not any(one() for one in made)
    finally:
        gc.enable()


def test_a_list_too_short_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without each row's best token the hypotheses are others."""
    stock = ops.topk_log_softmax

    def second_best(logits: torch.Tensor, k: int, banned: torch.Tensor | None = None) -> Any:
        log_probs, tokens, log_sum_exp = stock(logits, k + 1, banned)
        return log_probs[:, 1:], tokens[:, 1:], log_sum_exp

    monkeypatch.setattr(ops, "topk_log_softmax", second_best)
    with pytest.raises(AssertionError, match="tokens differ"):
        judge.compare(lambda: models.generate("post-norm", models.batch()))
