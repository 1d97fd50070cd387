"""Every option of the host's search, over the tree, against stock."""

from __future__ import annotations

import functools
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.token_generation_constraints import pack_constraints

import fastgen

OPTIONS: dict[str, dict[str, Any]] = {
    "length penalty": dict(len_penalty=0.3),
    "long": dict(len_penalty=2.0),
    "unnormalised": dict(normalize_scores=False),
    "unk penalty": dict(unk_penalty=1.5),
    "unk reward": dict(unk_penalty=-3.0),
    "min_len": dict(min_len=9),
    "max_len": dict(max_len_a=0.5, max_len_b=2),
    "max_len at once": dict(max_len_a=0, max_len_b=1, min_len=0),
    "temperature": dict(temperature=0.6),
    "match_source_len": dict(match_source_len=True),
    "beam as wide as the dictionary": dict(beam_size=100, max_len_b=4),
}
STRATEGIES: dict[str, Any] = {
    "diverse beam": functools.partial(search.DiverseBeamSearch, num_groups=2, diversity_strength=0.7),
    "diverse siblings": functools.partial(search.DiverseSiblingsSearch, diversity_rate=0.5),
    "sampling": search.Sampling,
    "top-k": functools.partial(search.Sampling, sampling_topk=6),
    "length-constrained": functools.partial(
        search.LengthConstrainedBeamSearch, min_len_a=0.5, min_len_b=1, max_len_a=1, max_len_b=2
    ),
}


@pytest.mark.parametrize("name", ["post-norm", "bart", "align", "prophetnet"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, name: str) -> None:
    is_fast = option not in ("match_source_len", "beam as wide as the dictionary")
    judge.compare(lambda: models.generate(name, models.batch(), **OPTIONS[option]), is_fast=is_fast)


@pytest.mark.parametrize("first_id", [0, 1000], ids=["", "ids of a dataset"])
@pytest.mark.parametrize("name", ["post-norm", "bart", "prophetnet"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, name: str, first_id: int) -> None:
    """The host's own diverse beam search crashes on a dataset's ids: there the reference has small ones."""
    lengths = [9, 5, 12, 7, 3, 3, 10]

    def run(first: int) -> Any:
        sample = models.batch(lengths, first_id=first)
        return models.generate(name, sample, strategy=STRATEGIES[strategy], max_len_b=20)

    judge.compare(lambda: run(first_id), reference=lambda: run(0))


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_constraints(ordered: bool) -> None:
    wanted = [[torch.tensor([5, 6]), torch.tensor([9])], [torch.tensor([11])], [], [torch.tensor([20, 21, 22])]]
    strategy = functools.partial(
        search.LexicallyConstrainedBeamSearch, representation="ordered" if ordered else "unordered"
    )

    def run() -> Any:
        return models.generate(
            "post-norm", models.batch(), constraints=pack_constraints(wanted), strategy=strategy, beam_size=6
        )

    expected = judge.compare(run)
    assert 11 in expected[1][0]["tokens"]


def test_allowed_tokens() -> None:
    """Constraints by prefix: the user's function sees the numbers of the dataset."""
    seen: set[int] = set()

    def allowed(sentence: int, tokens: torch.Tensor) -> list[int]:
        seen.add(int(sentence))
        return list(range(2 if len(tokens) > 3 else 4, 30 - int(sentence) % 5))

    strategy = functools.partial(search.PrefixConstrainedBeamSearch, prefix_allowed_tokens_fn=allowed)
    judge.compare(lambda: models.generate("bart", models.batch(first_id=70), strategy=strategy))
    assert seen == {70, 71, 72, 73}


PREFIXES = {
    "of one": [[5], [6], [7], [8]],
    "ragged": [[5, 6, 7], [8, 1, 1], [1, 1, 1], [9, 10, 1]],
    "with an end": [[5, 2, 1], [8, 9, 10], [6, 7, 2], [9, 10, 1]],
    "padded on the left": [[1, 1, 5], [1, 8, 9], [9, 10, 11], [4, 4, 4]],
    "longer than the output": [[5] * 20, [6] * 20, [7] * 20, [8] * 20],
    "empty": [[], [], [], []],
}


@pytest.mark.parametrize("name", ["post-norm", "bart", "prophetnet", "lm"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix: str, name: str) -> None:
    tokens = torch.tensor(PREFIXES[prefix], dtype=torch.long)
    for beams in (1, 3):
        judge.compare(
            lambda beams=beams: models.generate(name, models.batch(), prefix=tokens, beam_size=beams),
            is_fast=True,
        )


def test_sampled_language_model() -> None:
    strategy = functools.partial(search.Sampling, sampling_topk=5)
    judge.compare(lambda: models.prompted("lm", strategy=strategy, temperature=1.3, max_len_b=20))
    judge.compare(lambda: models.prompted("lm", strategy=STRATEGIES["diverse beam"], max_len_b=20))


@pytest.mark.parametrize("strategy", [None, "sampling"])
@pytest.mark.parametrize("fused", ["lm", "lm-gpt"])
def test_language_model_fusion(fused: str, strategy: str | None) -> None:
    options = dict(lm_model=models.load(fused), lm_weight=0.4, strategy=STRATEGIES.get(strategy or ""))
    plain = judge.stock(lambda: models.generate("post-norm", models.batch(), strategy=options["strategy"]))
    expected = judge.compare(lambda: models.generate("post-norm", models.batch([9, 5, 12, 7]), **options))
    assert [s[0]["score"] for s in expected] != [s[0]["score"] for s in plain], "the language model has no say"
    ensemble = ["post-norm", "pre-norm"]
    judge.compare(lambda: models.generate(ensemble, models.batch(), **options))
    judge.compare(lambda: models.prompted("lm", models.prompts([4, 4]), **options))


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("name", ["align", "align-full", "post-norm", "prophetnet"])
def test_alignments(name: str, kind: str) -> None:
    sample = models.batch([9, 5, 12, 7])
    sample["target"] = torch.full((4, 1), models.EOS)
    options: dict[str, Any] = dict(align=True, print_alignment=kind, left_pad_target=False)
    expected = judge.compare(lambda: models.generate(name, sample, **options))
    assert len(expected[0][0]["alignment"])


def test_reused_generator() -> None:
    """One generator for batches of several shapes, in turn on stock and on fastgen."""
    from fairseq.sequence_generator import SequenceGenerator

    model = models.load("bart")
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=10)
    for lengths in ([3, 4], [7], [2, 9, 4]):
        judge.compare(lambda lengths=lengths: generator.generate([model], models.batch(lengths)))
    assert "model" not in vars(generator) and vars(generator)["_modules"]["model"] is generator.model


def test_samples_are_left_as_they_are() -> None:
    sample = models.batch(first_id=50)
    before = judge.snapshot(sample)
    judge.ours(lambda: models.generate("post-norm", sample, strategy=STRATEGIES["diverse beam"]))
    assert sample.keys() == before.keys() and torch.equal(sample["id"], before["id"])
    for name, tensor in before["net_input"].items():
        assert torch.equal(sample["net_input"][name], tensor)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(strategy=STRATEGIES["diverse beam"]), "the search is DiverseBeamSearch"),
        (dict(match_source_len=True), "match_source_len"),
        (dict(beam_size=100, max_len_b=4), "more candidates than tokens"),
        (dict(lm_model="lm", lm_weight=0.4), "a language model is fused in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_fast_tier_leaves_to_the_hosts_loop(options: dict[str, Any], reason: str) -> None:
    if "lm_model" in options:
        options = {**options, "lm_model": models.load(options["lm_model"])}
    judge.compare(lambda: models.generate("post-norm", models.batch(), **options), is_fast=False)
    with judge.configured(tier="fast"):
        _, (call,) = judge.ours(lambda: models.generate("post-norm", models.batch(), **options), strict=False)
        assert call.tier == "compat" and reason in str(call.reason)
        with pytest.raises(fastgen.FallbackError, match=reason):
            judge.ours(lambda: models.generate("post-norm", models.batch(), **options))


def test_a_prefix_that_leaves_a_token_open_and_then_ends() -> None:
    """The host refuses that; so do we, in its words or rather without any."""
    prefix = torch.tensor([[5, 1, 2], [1, 6, 2], [7, 8, 9], [7, 2, 1]])
    for tier in ("compat", "fast"):
        with judge.configured(tier=tier), pytest.raises(AssertionError):
            judge.ours(lambda: models.generate("post-norm", models.batch(), prefix=prefix), strict=False)


@pytest.mark.parametrize("name", ["_prefix_tokens", "finalize_hypos", "is_finished"])
def test_a_generator_with_rules_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairseq.sequence_generator import SequenceGenerator

    model, rule = models.load("bart"), getattr(SequenceGenerator, name)

    def own(*args: Any) -> Any:
        return rule(*args)

    derived = type("Derived", (SequenceGenerator,), {name: own})
    generator = derived([model], models.dictionary(), beam_size=3, max_len_b=10)
    judge.compare(lambda: generator.generate([model], models.batch()), is_fast=False)


def test_the_hosts_loop_on_a_cpu_ours_where_it_is_asked_for() -> None:
    for tier, expected in (("auto", "compat"), ("compat", "compat"), ("fast", "fast")):
        with judge.configured(tier=tier):
            _, (call,) = judge.ours(lambda: models.generate("post-norm", models.batch()))
        assert (call.tier, call.reason) == (expected, None)


def test_the_stock_tier() -> None:
    with judge.configured(tier="stock"):
        result, calls = judge.ours(lambda: models.generate("post-norm", models.batch()))
    judge.assert_same(judge.stock(lambda: models.generate("post-norm", models.batch())), result, exactly=True)
    assert [(call.tier, call.reason) for call in calls] == [("stock", "tier='stock' is configured")]
