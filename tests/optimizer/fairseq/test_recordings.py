"""A recorded step that later calls replay, with their own source, while the model is what it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.modules import transformer_layer
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen.cache import retained, tree
from fastgen.cache.tree import BeamTree
from fastgen.decoding.fairseq_beam_search import FairseqBeamSearch
from fastgen.optimizer.fairseq.model.session import Session
from fastgen.optimizer.fairseq.replay.guards import guards_of_steps
from fastgen.optimizer.fairseq.replay.step_state import State
from fastgen.replay import replayer, statistics, store

pytestmark = pytest.mark.usefixtures("recording")

LENGTHS = (5, 9, 7)
LONG = dict(beam_size=3, min_len=12, max_len_b=12)


def _run(model: Any, lengths: Any = LENGTHS, seed: int = 0, **options: Any) -> Any:
    sample = models.batch(lengths)
    tokens = sample["net_input"]["src_tokens"]
    tokens[tokens > 3] = 4 + (tokens[tokens > 3] - 4 + seed) % models.WORDS
    return models.generate(model, sample, **{**LONG, **options})


def _captures(model: Any, *args: Any, tier: str = "compat", **options: Any) -> int:
    """Compare a call with stock's; how many steps it has captured: the model's, and in our loop the search's."""
    run = partial(_run, model, *args, **options)
    expected = judge.stock(run)
    before = copy.copy(statistics.counts(model))
    with judge.configured(tier=tier):
        result, (call,) = judge.ours(run)
    assert call.tier == tier
    judge.assert_same(expected, result)
    after = statistics.counts(model)
    assert after.replays > before.replays, "nothing was replayed"
    return after.captures - before.captures


def _recorded(name: str = "post-norm", tier: str = "compat") -> Any:
    """A model with one recording."""
    model = copy.deepcopy(models.load(name))
    assert _captures(model, tier=tier) == (1 if tier == "compat" else 2) and store.count(model) == 1
    return model


@pytest.mark.parametrize("tier", ["compat", "fast"])
@pytest.mark.parametrize("name", models.TRANSLATORS)
def test_later_calls(name: str, tier: str) -> None:
    model = _recorded(name, tier)
    assert "1 kept for later calls" in fastgen.status().replayed[type(model).__name__]
    assert [_captures(model, seed=seed, tier=tier) for seed in (1, 2)] == [0, 0]


def test_one_tier_after_the_other() -> None:
    """The host's loop is given the best tokens of normalised scores, ours all."""
    model = _recorded()
    counts = [_captures(model, seed=seed, tier=tier) for seed, tier in enumerate(["fast", "compat", "fast", "compat"])]
    assert counts == [2, 0, 0, 0] and store.count(model) == 2


@pytest.mark.parametrize("tier", ["compat", "fast"])
def test_sources_of_like_lengths(tier: str) -> None:
    """Padded or not, and of one token: attention is to the source's own positions."""
    model = copy.deepcopy(models.load("bart"))
    first = 1 if tier == "compat" else 2
    lengths = [(15,), (3,), (14,), (1,), (17,), (20,), (9,)]
    assert [_captures(model, each, tier=tier) for each in lengths] == [first, 0, 0, 0, first, 0, 0]


def test_other_options_have_recordings_of_their_own() -> None:
    model = _recorded()
    assert _captures(model, temperature=0.7) == 1
    assert _captures(model, beam_size=2) == 1
    assert _captures(model, strategy=None, unk_penalty=1.0, seed=1) == 0
    assert store.count(model) == 3


def test_what_a_call_has_returned_stays() -> None:
    for tier in ("compat", "fast"):
        model = _recorded(tier=tier)
        with judge.configured(tier=tier):
            first, _ = judge.ours(partial(_run, model, seed=1))
            before = copy.deepcopy(first)
            judge.ours(partial(_run, model, seed=2))
        judge.assert_same(before, first, exactly=True)


def _weights(model: Any) -> None:
    with torch.no_grad():
        model.decoder.layers[0].fc1.weight.mul_(-1)


def _data(model: Any) -> None:
    model.decoder.layers[1].self_attn.out_proj.weight.data[3, 5] += 3.0


def _module(model: Any) -> None:
    model.decoder.layers[0].fc2 = copy.deepcopy(model.decoder.layers[0].fc2)
    model.decoder.layers[0].fc2.bias.data += 1


def _attribute(model: Any) -> None:
    model.decoder.embed_scale *= 2


def _function(model: Any) -> None:
    model.decoder.layers[0].activation_fn = torch.tanh


def _layers(model: Any) -> None:
    model.decoder.layers = model.decoder.layers[:1]


@pytest.mark.parametrize("edit", [_weights, _data, _module, _attribute, _function, _layers])
def test_edits(edit: Callable[[Any], None]) -> None:
    model = _recorded()
    before = judge.stock(partial(_run, model, seed=1))
    edit(model)
    after = judge.stock(partial(_run, model, seed=1))
    assert [s[0]["score"] for s in before] != [s[0]["score"] for s in after]
    _captures(model, seed=1)


def test_a_class_that_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded()
    forward = transformer_layer.TransformerDecoderLayerBase.forward

    def twice(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, 2 * x, *args, **kwargs)

    replays_before = statistics.counts(model).replays
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layer.TransformerDecoderLayerBase, "forward", twice)
        judge.compare_fallback(partial(_run, model, seed=1), "has its own forward")
    assert statistics.counts(model).replays == replays_before, "the class is called, as whoever replaced it expects"
    assert _captures(model, seed=1) == 0


def test_a_snapshot_sees_a_class_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(models.load("post-norm"))
    before = guards_of_steps([model])
    assert before.is_complete and before.is_current()
    monkeypatch.setattr(transformer_layer.TransformerDecoderLayerBase, "extra", 1, raising=False)
    assert not before.is_current()


def test_sentences_leave_and_others_come() -> None:
    model = _recorded()
    sample, prefix = models.staggered(9)
    for _ in range(2):
        judge.compare(lambda: models.generate(model, sample, prefix=prefix, beam_size=3, max_len_b=25))
    assert _captures(model, seed=1) == 0


@pytest.mark.parametrize("tier", ["compat", "fast"])
def test_a_call_that_grew(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call grows into the same buffers."""
    monkeypatch.setattr(tree, "FIRST_STEPS", 5)
    monkeypatch.setattr(retained, "_OUTGROWN", 100)
    monkeypatch.setattr(replayer, "_PATIENCE", 1)
    model = copy.deepcopy(models.load("post-norm"))
    counts = [_captures(model, seed=seed, tier=tier, min_len=20, max_len_b=20) for seed in (0, 0, 1, 0, 1)]
    assert counts[0] > 2 and store.count(model) == 1
    assert counts[1] == counts[3] == counts[4] == 0, "as far as it grew in the same steps"


def _left(model: Any, seed: int, tier: str) -> tuple[int, list[int]]:
    """Captures of a call that sentences leave, and how many there were after each time."""
    left, select = [], BeamTree.select

    def noting(self: BeamTree, sentences: torch.Tensor) -> None:
        left.append(len(sentences))
        select(self, sentences)

    sample, prefix = models.staggered(9)
    tokens = sample["net_input"]["src_tokens"]
    tokens[tokens > 3] = 4 + (tokens[tokens > 3] - 4 + seed) % models.WORDS
    before = copy.copy(statistics.counts(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamTree, "select", noting)
        run = partial(models.generate, model, sample, prefix=prefix, beam_size=3, max_len_b=25)
        expected = judge.stock(run)
        with judge.configured(tier=tier):
            judge.assert_same(expected, judge.ours(run)[0])
    after = statistics.counts(model)
    assert after.replays > before.replays
    return after.captures - before.captures, left


@pytest.mark.parametrize("cache", ["kv", "x"])
@pytest.mark.parametrize("tier", ["compat", "fast"])
def test_sentences_leave(tier: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured before is kept; the next call begins where this one began, with all of its sentences."""
    monkeypatch.setattr(replayer, "_PATIENCE", 1)
    model = copy.deepcopy(models.load("post-norm"))
    with judge.configured(cache=cache):
        first, left = _left(model, 0, tier)
        assert left and first > 1 and store.count(model) == 1
        assert [_left(model, seed, tier)[0] < first for seed in (0, 1, 0)][::2] == [True, True]


def test_no_room_for_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(models.load("post-norm"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "may_keep", lambda more, device: more == 0)
        _, left = _left(model, 0, "fast")
        assert left and store.count(model) == 0
    assert _left(model, 0, "fast")[1] == left and store.count(model) == 1


@pytest.mark.parametrize("what", [(kind, "restore_first_buffers") for kind in (State, Session, BeamTree)])
def test_the_way_back_is_needed(what: tuple[type, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "_PATIENCE", 1)
    model = copy.deepcopy(models.load("post-norm"))
    monkeypatch.setattr(*what, lambda _: None)
    with pytest.raises(Exception, match=r"tokens differ|off by|shape|size|assert"):
        for _ in range(2):
            _left(model, 0, "fast")
            assert store.count(model) == 1


@pytest.mark.parametrize("tier", ["compat", "fast"])
def test_language_models(tier: str) -> None:
    """With a prompt, which is another each time, and without."""
    model = copy.deepcopy(models.load("lm"))
    counts = []
    for seed in (1, 2, 3):
        for sample in (models.prompts(seed=seed), models.prompts((1, 1, 1), seed=seed)):
            run = partial(models.prompted, model, sample, beam_size=3, max_len_b=20, min_len=18)
            expected, before = judge.stock(run), copy.copy(statistics.counts(model))
            with judge.configured(tier=tier):
                judge.assert_same(expected, judge.ours(run)[0])
            after = statistics.counts(model)
            assert after.replays > before.replays + 10
            counts.append(after.captures - before.captures)
    assert min(counts[:2]) > 0 and counts[2:] == [0] * 4 and store.count(model) == 2


def _of_two(two: list[Any]) -> tuple[SequenceGenerator, Callable[..., Any]]:
    generator = SequenceGenerator(two, models.dictionary(), **LONG)

    def run(seed: int) -> Any:  # fairseq's `generate` takes models, and looks at none of them
        sample = models.batch(LENGTHS)
        tokens = sample["net_input"]["src_tokens"]
        tokens[tokens > 3] = 4 + (tokens[tokens > 3] - 4 + seed) % models.WORDS
        return generator.generate(two, sample)

    return generator, run


def test_ensembles() -> None:
    """A generator's ensemble keeps its recordings, which hold as long as each of its models is what it was."""
    two = [copy.deepcopy(models.load("post-norm", seed=seed)) for seed in (0, 1)]
    generator, run = _of_two(two)
    captures = []
    for number, seed in enumerate((0, 1, 2, 2)):
        if number == 3:
            _data(two[1])
        expected = judge.stock(partial(run, seed))
        before = copy.copy(statistics.counts(two[0]))
        judge.assert_same(expected, judge.ours(partial(run, seed))[0])
        after = statistics.counts(two[0])
        assert after.replays > before.replays
        captures.append(after.captures - before.captures)
    assert captures[0] > 0 and captures[1:3] == [0, 0] and store.count(generator.model) == 1
    assert not store.count(two[0])
    assert "1 kept for later calls" in fastgen.status().replayed[type(two[0]).__name__]
    reference, model = weakref.ref(generator.model), weakref.ref(two[1])
    del generator, run, two, expected
    gc.collect()
    assert reference() is None and model() is None


def test_a_model_that_is_exchanged() -> None:
    """While others hold on to the old one, which has not changed."""
    three = [copy.deepcopy(models.load("post-norm", seed=seed)) for seed in (0, 1, 2)]
    for count in (2, 1):
        generator, run = _of_two(three[:count])
        for last in (three[count - 1], three[2], three[count - 1]):
            generator.model.models[count - 1] = last
            expected = judge.stock(partial(run, 1))
            is_changed = count == 1 and last is three[2]  # the host keeps further names for the first model
            found, calls = judge.ours(partial(run, 1), strict=not is_changed)
            judge.assert_same(expected, found)
            assert (calls[-1].tier == "stock") == is_changed


def test_a_language_model_that_is_fused_in() -> None:
    """It runs over the same tree: neither takes such a call a recording of others, nor do others take one of it."""
    model = _recorded()
    for seed in (1, 2):
        options = dict(lm_model=models.load("lm"), lm_weight=0.4)
        judge.compare(partial(_run, model, seed=seed, **options))
        assert _captures(model, seed=seed) == 0


def test_no_model_is_kept_alive() -> None:
    model = _recorded()
    _captures(model, seed=1)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_released() -> None:
    model = _recorded()
    assert store.nbytes(model) > 0
    fastgen.release()
    assert store.count(model) == 0 and _captures(model, seed=1) == 1


def test_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded()

    def encode(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(type(model.encoder), "forward", encode)
        judge.ours(partial(_run, model, seed=1))
    assert store.count(model) == 0 and _captures(model, seed=1) == 1


@pytest.mark.parametrize("what", [(State, "fill"), (FairseqBeamSearch, "restart")])
def test_negative_controls(what: tuple[type, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded(tier="fast")
    monkeypatch.setattr(*what, lambda self, other: None)
    with pytest.raises(Exception, match=r"tokens differ|off by|shape|step|index|became|nothing"):
        _captures(model, seed=1, tier="fast")


@pytest.mark.parametrize("cache", ["x", "k"])
def test_of_old_weights_no_recording_is_kept(cache: str) -> None:
    model = copy.deepcopy(models.load("post-norm"))
    run = partial(_run, model)
    with judge.configured(cache=cache):
        for _ in range(3):
            for _ in range(2):  # the first is judged on keys and values, if weights are to be inverted
                judge.assert_same(judge.stock(run), judge.ours(run)[0])
            assert store.count(model) == 1
            for layer in model.decoder.layers:
                layer.self_attn.k_proj.weight.data.mul_(1.25)
