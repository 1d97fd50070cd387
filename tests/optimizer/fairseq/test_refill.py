"""Samples that decode together: every sentence gets what stock makes of its sample."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from joined_samples import LENGTHS, PLENTY, SENTENCES, assert_same, each, generator_of, refilled, samples

import fastgen
from fastgen import report
from fastgen.bench.soak import modes
from fastgen.cache.batch_tree import BatchTree
from fastgen.cache.tree import BeamTree
from fastgen.optimizer.fairseq.generate import continuous_batch
from fastgen.optimizer.fairseq.generate.batch_decoder import BatchDecoder
from fastgen.optimizer.suspending import Suspendable

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": dict(len_penalty=2.0, min_len=5),
    "n-grams": dict(no_repeat_ngram_size=2, unk_penalty=1.0),
    "temperature": dict(temperature=0.7, normalize_scores=False),
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[int, int]]]]:
    """Sentences and position of every part, at every joint step."""
    seen: list[list[tuple[int, int]]] = []
    step = BatchDecoder.step

    def counted(self: BatchDecoder) -> None:
        seen.append([(part.sentences, part.step.tokens.shape[1]) for part in self.parts])
        step(self)

    monkeypatch.setattr(BatchDecoder, "step", counted)
    yield seen
    assert not [thread for thread in threading.enumerate() if thread.name == "fastgen-suspended"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_identical(name: str, option: str, steps: list[list[tuple[int, int]]]) -> None:
    given, options = samples(), OPTIONS[option]
    assert_same(each(name, given, **options), refilled(name, given, **options))
    assert any(len({position for _, position in step}) > 1 for step in steps), "all were at one position"
    assert max(sum(count for count, _ in step) for step in steps) <= SENTENCES
    (call,) = report.calls()
    assert (call.tier, call.reason, call.batch, call.steps) == ("compat", None, sum(map(len, LENGTHS)), len(steps))
    assert call.cache_bytes


def test_sources_padded_on_the_right() -> None:
    given = samples(left=False)
    assert_same(each("bart", given), refilled("bart", given))


def test_pruned_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = samples()
    stock = each("post-norm", given)
    monkeypatch.setattr(BeamTree, "_is_full", lambda self: True)
    monkeypatch.setattr("fastgen.cache.tree._WORTH_PRUNING", 1.0)
    assert_same(stock, refilled("post-norm", given))


@pytest.mark.parametrize(("sentences", "tokens"), [(1, PLENTY), (100, PLENTY), (SENTENCES, 1), (SENTENCES, 60)])
def test_room(sentences: int, tokens: int, steps: list[list[tuple[int, int]]]) -> None:
    given = samples()
    assert_same(each("learned", given), refilled("learned", given, sentences, tokens))
    assert (max(map(len, steps)) == 1) == (1 in (sentences, tokens))


def test_the_parts_of_a_sample_are_padded_as_it_was() -> None:
    """`max_len_a` counts the padding."""
    sample = {**models.batch((3, 12, 5, 4, 7)), "target": torch.arange(10).view(5, 2), "ntokens": 31}
    parts = continuous_batch.in_parts(sample, 2)
    assert [part["nsentences"] for part in parts] == [2, 2, 1]
    assert [part["id"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [tuple(part["net_input"]["src_tokens"].shape) for part in parts] == [(2, 13), (2, 13), (1, 13)]
    assert torch.equal(torch.cat([part["target"] for part in parts]), sample["target"])
    (whole,) = each("pre-norm", [sample], max_len_a=1.0, max_len_b=0)
    results = refilled("pre-norm", parts, max_len_a=1.0, max_len_b=0)
    judge.assert_same(whole, [found for part in results for found in part])


def test_half_precision() -> None:
    """Products add in another order with other rows, so a hypothesis or two may turn at a near tie."""
    model = copy.deepcopy(models.load("learned")).to(torch.bfloat16)
    generator = SequenceGenerator([model], models.dictionary(), beam_size=2, max_len_a=0.8, max_len_b=5)
    alone = [generator.generate([model], sample) for sample in samples()]
    together = fastgen.generate_samples(generator, iter(samples()), refill=True)
    same = [
        torch.equal(a[0]["tokens"], b[0]["tokens"])
        for theirs, mine in zip(alone, together, strict=True)
        for a, b in zip(theirs, mine, strict=True)
    ]
    assert sum(same) >= 0.8 * len(same), same


def test_prefixes_that_end_sentences(steps: list[Any]) -> None:
    given = [models.staggered(count) for count in (4, 6, 3, 5)]

    def infer(loaded: Any, generator: Any, number: int) -> Any:
        return generator.generate(loaded, given[number][0], prefix_tokens=given[number][1])

    loaded, generator = generator_of("post-norm")
    with fastgen.disabled():
        expected = [infer(loaded, generator, number) for number in range(len(given))]
    numbers = iter(range(len(given)))  # samples begin in their order
    found = dict(
        continuous_batch.run(lambda _: infer(loaded, generator, next(numbers)), [s for s, _ in given], 9, PLENTY)
    )
    assert_same(expected, [found[number] for number in range(len(given))])
    assert any(len({position for _, position in step}) > 1 for step in steps)


@pytest.mark.parametrize("tier", ["stock", "disabled"])
def test_switched_off_in_the_middle_of_nothing(tier: str, steps: list[Any]) -> None:
    """Searches that do not join run one after the other."""
    given = samples()
    expected = each("post-norm", given)
    loaded, generator = generator_of("post-norm")
    with fastgen.disabled() if tier == "disabled" else judge.configured(tier=tier):
        found = dict(continuous_batch.run(lambda sample: generator.generate(loaded, sample), given, SENTENCES, PLENTY))
    assert_same(expected, [found[number] for number in range(len(given))])
    assert not steps


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("lstm", {}, "not fairseq's Transformer decoder"),
        ("lm", {}, "no encoder"),
        ("post-norm", dict(match_source_len=True), "match_source_len"),
        ("post-norm", dict(search_strategy=search.Sampling(models.dictionary())), "Sampling may know"),
        ("post-norm", dict(lm_model=models.load("lm")), "several models"),
    ],
)
def test_what_cannot_be_refilled(name: str, options: dict[str, Any], why: str) -> None:
    assert why in str(continuous_batch.unrefillable(generator_of(name, **options)[1]))


def test_ensembles_other_generators_and_other_tiers_cannot_be_refilled() -> None:
    two = SequenceGenerator([models.load("post-norm"), models.load("post-norm", seed=1)], models.dictionary())
    assert "several models" in str(continuous_batch.unrefillable(two))

    class Derived(SequenceGenerator):
        pass

    assert "Derived" in str(continuous_batch.unrefillable(Derived([models.load("post-norm")], models.dictionary())))
    _, generator = generator_of("post-norm")
    assert continuous_batch.unrefillable(generator) is None
    with judge.configured(tier="stock"):
        assert "tier" in str(continuous_batch.unrefillable(generator))
    with fastgen.disabled():
        assert "disabled" in str(continuous_batch.unrefillable(generator))


def _own_rule(generator: Any, notes: list[Any]) -> str:
    inner = generator.finalize_hypos
    generator.finalize_hypos = lambda *args: (notes.append(args[0]), inner(*args))[1]
    return "the generator has its own finalize_hypos"


def _own_step(generator: Any, notes: list[Any]) -> str:
    inner = generator.search.step
    generator.search.step = lambda *args: (notes.append(tuple(args[1].shape)), inner(*args))[1]
    return "the search has rules of its own"


def _own_blocker(generator: Any, notes: list[Any]) -> str:
    generator.repeat_ngram_blocker = NGramRepeatBlock(3)
    generator.repeat_ngram_blocker.forward = lambda tokens, lprobs, *_: (notes.append(tuple(tokens.shape)), lprobs)[1]
    return "the search has rules of its own"


def _hook_on_the_encoder(generator: Any, notes: list[Any]) -> str:
    fc1 = generator.model.single_model.encoder.layers[0].fc1
    fc1.register_forward_hook(lambda module, args, output: notes.append(tuple(args[0].shape)))
    return "encoder.layers.0.fc1 has hooks of yours"


def _hook_on_the_decoder(generator: Any, notes: list[Any]) -> str:
    fc1 = generator.model.single_model.decoder.layers[0].fc1
    fc1.register_forward_hook(lambda module, args, output: notes.append(tuple(args[0].shape)))
    return "decoder.layers.0.fc1 has hooks of yours"


@pytest.mark.parametrize(
    "change", [_own_rule, _own_step, _own_blocker, _hook_on_the_encoder, _hook_on_the_decoder], ids=lambda f: f.__name__
)
def test_code_of_the_users_sees_whole_samples(change: Any, steps: list[Any]) -> None:
    """It is called as often as by stock, and with as many sentences."""
    notes: list[Any] = []
    model = copy.deepcopy(models.load("post-norm"))
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=9)
    reason = change(generator, notes)
    with fastgen.disabled():
        expected = [generator.generate([model], sample) for sample in samples()]
    of_stock = notes[:]
    notes.clear()
    assert continuous_batch.unrefillable(generator) == reason
    assert_same(expected, fastgen.generate_samples(generator, samples(), refill=True))
    assert of_stock and notes == of_stock and not steps


def test_a_state_of_this_thread_alone(steps: list[Any]) -> None:
    """Autocast is not on in the threads of the parts, and a mode is not active there."""
    loaded, generator = generator_of("post-norm")
    with torch.autocast("cpu", torch.bfloat16):
        alone = [generator.generate(loaded, sample) for sample in samples()]
        assert "this thread alone" in str(continuous_batch.unrefillable(generator))
        assert_same(alone, fastgen.generate_samples(generator, samples(), refill=True))
    with modes.MODES["counting_functions"].entered():
        assert "this thread alone" in str(continuous_batch.unrefillable(generator))
    assert continuous_batch.unrefillable(generator) is None and not steps


def test_an_error_in_one_search_is_raised_and_leaves_no_thread(steps: list[Any]) -> None:
    given, before = samples(), threading.active_count()
    wrong = [*given[:3], {**given[3], "net_input": {**given[3]["net_input"], "nonsense": 1}}, *given[4:]]
    loaded, generator = generator_of("post-norm")

    def infer(sample: dict[str, Any]) -> Any:
        if "nonsense" in sample["net_input"]:
            raise KeyError("nonsense")
        return generator.generate(loaded, sample)

    with pytest.raises(KeyError, match="nonsense"):
        list(continuous_batch.run(infer, wrong, SENTENCES, PLENTY))
    assert threading.active_count() == before
    assert_same(each("post-norm", given), refilled("post-norm", given))


def test_abandoned_half_way(steps: list[Any]) -> None:
    loaded, generator = generator_of("post-norm")
    before = threading.active_count()
    running = continuous_batch.run(lambda sample: generator.generate(loaded, sample), samples(), SENTENCES, PLENTY)
    next(running)
    assert threading.active_count() > before
    running.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("refilling", [True, False, None])
def test_the_public_function(refilling: bool | None, steps: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    given = samples()
    expected = each("align", given)
    _, generator = generator_of("align")
    assert_same(expected, fastgen.generate_samples(generator, given, refill=refilling, progress=True))
    assert bool(steps) == bool(refilling)
    assert capsys.readouterr().err.startswith(f"{sum(map(len, LENGTHS))}, ")
    assert fastgen.generate_samples(generator, [], refill=refilling) == []


def test_other_generators_decode_sample_by_sample(steps: list[Any]) -> None:
    given = samples()
    expected = each("post-norm", given, match_source_len=True)
    _, generator = generator_of("post-norm", match_source_len=True)
    assert_same(expected, fastgen.generate_samples(generator, given, refill=True))
    assert not steps


@pytest.mark.parametrize("inference", [False, True])
def test_a_suspended_function_sees_its_callers_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        part = Suspendable(lambda: part.ask(torch.is_inference_mode_enabled()) * 2)
        assert part.resume() == inference
        assert part.resume(21) is None and part.ended and part.result == 42


# ---------------------------------------------------------------------------------------------- negative controls
def _one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_for_all(self: BatchDecoder, tokens: torch.Tensor, incremental_state: Any = None) -> torch.Tensor:
        embedded = self._positions(self.parts[0].step.tokens, incremental_state=incremental_state)[:1]
        return embedded.expand(len(tokens), -1, -1)

    monkeypatch.setattr(BatchDecoder, "_at_each_position", first_for_all)


def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fastgen.optimizer.fairseq.generate.batch_decoder.additive_mask", lambda mask, dtype: torch.zeros(mask.shape)
    )


def _never_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchTree, "reorder", lambda self, parents: None)


@pytest.mark.parametrize("damage", [_one_position, _nothing_hidden, _never_reordered])
def test_damage_is_seen(damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = samples()
    expected = each("learned", given)
    damage(monkeypatch)
    with pytest.raises(AssertionError, match=r"differ|off by"):
        assert_same(expected, refilled("learned", given))


def test_a_suspended_search_has_the_callers_settings() -> None:
    with fastgen.configured(packing="off"):
        search = Suspendable(lambda: fastgen.config.current().packing)
    search.resume()
    assert search.result == "off"
