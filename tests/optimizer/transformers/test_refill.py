"""Calls that decode together, and lists longer than a batch: every sentence gets what it gets alone."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import harness
import joint_steps
import pytest
import torch
import transformers
import zoo
from joined_calls import ROWS, SHAPES, calls_of, refilled, stock_results
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

import fastgen
from fastgen import report
from fastgen.cache.batch_tree import BatchTree
from fastgen.cache.tree import BeamTree
from fastgen.optimizer.transformers import families, versions
from fastgen.optimizer.transformers.generate import batch_decoder, continuous_batch, shareable

FAMILIES = sorted(set(zoo.ACCELERATED) & families.SHARE_BATCHES)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4, max_new_tokens=16),
    "early": dict(num_beams=3, max_new_tokens=14, early_stopping=True, length_penalty=-1.0),
    "ranked": dict(num_beams=4, max_new_tokens=12, num_return_sequences=3, no_repeat_ngram_size=2, min_new_tokens=4),
    "processors": dict(
        num_beams=2, max_new_tokens=10, repetition_penalty=1.3, bad_words_ids=[[7], [9, 11]], forced_eos_token_id=2
    ),
    "sources": dict(num_beams=3, max_new_tokens=12, encoder_no_repeat_ngram_size=2),
}


def assert_equal(stock: list[Any], results: list[Any]) -> None:
    for number, (theirs, mine) in enumerate(zip(stock, results, strict=True)):
        assert mine.shape == theirs.shape and torch.equal(mine, theirs), f"call {number} differs"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    return joint_steps.watch(monkeypatch)


@pytest.mark.parametrize(
    "family, options",
    [(family, name) for family in FAMILIES for name in OPTIONS if name != "sources" or family not in zoo.DECODERS],
)
def test_identical(family: str, options: str, spans: list[list[tuple[int, int]]]) -> None:
    model = zoo.load(family)
    calls = calls_of(family, **OPTIONS[options])
    assert_equal(stock_results(model, calls), refilled(model, calls))
    assert any(len({position for _, position in step}) > 1 for step in spans), "all were at one position"
    assert max(sum(rows for rows, _ in step) for step in spans) <= ROWS * calls[0]["num_beams"]
    (call,) = report.calls()[-1:]
    assert (call.tier, call.batch, call.steps) == ("fast", sum(batch for batch, _ in SHAPES), len(spans))


@pytest.mark.parametrize("family", ["bart", "t5", "llama", "mistral"])
def test_pruned_at_every_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = zoo.load(family), calls_of(family, **OPTIONS["plain"])
    stock = stock_results(model, calls)
    monkeypatch.setattr(BeamTree, "_is_full", lambda self: True)
    monkeypatch.setattr("fastgen.cache.tree._WORTH_PRUNING", 1.0)
    assert_equal(stock, refilled(model, calls))


@pytest.mark.parametrize("family", ["marian", "t5", "gpt2"])
def test_leaving_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_decoder, "_CLEAR_FROM", 0.0)
    model, calls = zoo.load(family), calls_of(family, **OPTIONS["early"])
    assert_equal(stock_results(model, calls), refilled(model, calls))
    assert_equal(stock_results(model, calls), refilled(model, calls, rows=1))  # each call alone
    assert_equal(stock_results(model, calls), refilled(model, calls, rows=100))  # all at once


def test_a_call_that_ends_at_once() -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    for number in (0, 3, 6):
        calls[number]["max_new_tokens"] = 1
    assert_equal(stock_results(model, calls), refilled(model, calls))


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=1),
        dict(num_beams=3, do_sample=True, top_k=0),
        dict(num_beams=3, logits_processor=lambda: LogitsProcessorList([_Shift()])),
    ],
    ids=["greedy", "sampled", "a user's processor"],
)
def test_calls_that_stay_alone(options: dict[str, Any], spans: list[Any]) -> None:
    """What cannot leave its batch, or is no search, runs as always, one call after the other."""
    model, calls = zoo.load("bart"), calls_of("bart", max_new_tokens=9, **options)
    results = []
    for call in calls:  # the judge reseeds for each
        results += refilled(model, [call]) if not options.get("do_sample") else [_seeded(model, call)]
    assert_equal(stock_results(model, calls), results)
    assert not spans


def _seeded(model: Any, call: dict[str, Any]) -> Any:
    torch.manual_seed(harness.SEED)
    return refilled(model, [call])[0]


class _Shift(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(scores.shape[0])[:, None] * 0.01


def test_some_calls_together_and_some_alone(spans: list[Any]) -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    for number in (1, 4):
        calls[number]["logits_processor"] = lambda: LogitsProcessorList([_Shift()])
    assert_equal(stock_results(model, calls), refilled(model, calls))
    assert spans


@pytest.mark.parametrize("switch", ["tier", "disabled"])
def test_switched_off(switch: str, spans: list[Any]) -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    stock = stock_results(model, calls)
    if switch == "tier":
        with harness.configured(tier="stock"):
            assert_equal(stock, refilled(model, calls))
    else:
        with fastgen.disabled():
            assert_equal(stock, refilled(model, calls))
    assert not spans


def test_why_calls_cannot_be_refilled() -> None:
    model, (call, *_) = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    assert shareable.unrefillable(model, call) is None
    assert shareable.unrefillable(model, {**call, "num_beams": 1}) == "it is no beam search"
    assert shareable.unrefillable(model, {**call, "use_cache": False}) == "no cache of the standard kind is used"
    with fastgen.disabled():
        assert "disabled" in str(shareable.unrefillable(model, call))


def test_a_version_that_is_left_alone_decodes_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, continuous_batch.__name__, None)
    model, sources = zoo.load("bart"), _sources("bart")[:3]
    for refilling in (True, None):
        for source, result in zip(
            sources, fastgen.generate(model, sources, refill=refilling, num_beams=2, max_new_tokens=6), strict=True
        ):
            assert torch.equal(result, _alone(model, source, num_beams=2, max_new_tokens=6))


def test_models_that_cannot_be_refilled() -> None:
    assert "own generate" in str(shareable.unrefillable_model(zoo.load("whisper")))
    assert "not been tried" in str(shareable.unrefillable_model(zoo.load("bert2bert")))

    class Derived(type(zoo.load("bart").model.decoder.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = transformers.BartForConditionalGeneration(zoo.load("bart").config)
    assert shareable.unrefillable_model(model) is None
    model.model.decoder.layers[0].__class__ = Derived
    assert "not been tried" in str(shareable.unrefillable_model(model))


def test_an_error_in_one_call_is_raised_and_leaves_nothing_behind() -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    wrong = [*calls[:3], {**calls[3], "nonsense": 1}, *calls[4:]]
    with pytest.raises(ValueError, match="nonsense"):
        refilled(model, wrong, strict=False)
    assert_equal(stock_results(model, calls), refilled(model, calls))


def test_abandoned_half_way() -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    with harness.configured(strict=True):
        running = continuous_batch.run(model, [harness.request(call, {}) for call in calls], ROWS)
        next(running)
        running.close()
    assert torch.is_grad_enabled()
    assert_equal(stock_results(model, calls), refilled(model, calls))


def test_gradients_are_as_before_between_results() -> None:
    model, calls = zoo.load("bart"), calls_of("bart", **OPTIONS["plain"])
    for _ in continuous_batch.run(model, [harness.request(call, {}) for call in calls], ROWS):
        assert torch.is_grad_enabled()


# ---------------------------------------------------------------------------------------------- negative controls
def _no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_decoder, "_absolute_positions", lambda model: {})


def _one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomers' prompts lie where their positions say, not as far back as they are."""
    regroup = BatchTree.regroup

    def shifted(self: BatchTree, stay: torch.Tensor, newcomers: list[BeamTree]) -> None:
        regroup(self, stay, newcomers)
        self._positions[len(stay) :] = torch.arange(self._positions.shape[1])

    monkeypatch.setattr(BatchTree, "regroup", shifted)


@pytest.mark.parametrize(
    ("family", "damage"), [("bart", _no_positions), ("m2m_100", _no_positions), ("t5", _one_clock)]
)
def test_wrong_positions_are_seen(
    family: str, damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = zoo.load(family), calls_of(family, **OPTIONS["plain"])
    stock = stock_results(model, calls)
    damage(monkeypatch)
    with pytest.raises(AssertionError, match="differs"):
        assert_equal(stock, refilled(model, calls))


# ---------------------------------------------------------------------------------------------- the public function
def _sources(family: str) -> list[list[int]]:
    """Of all lengths from 1 to 12, in no order."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (1 + 5 * number % 12,), generator=generator).tolist()
        for number in range(17)
    ]


def _alone(model: Any, source: list[int], **options: Any) -> torch.Tensor:
    with fastgen.disabled():
        ids = torch.tensor([source])
        result: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return result


@pytest.mark.parametrize("refilling", [True, False, None])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_each_source_gets_what_it_gets_alone(family: str, refilling: bool | None, spans: list[Any]) -> None:
    model, sources = zoo.load(family), _sources(family)
    options = dict(num_beams=3, max_new_tokens=8, num_return_sequences=2)
    results = fastgen.generate(model, sources, batch_size=6, refill=refilling, **options)
    for number, (source, result) in enumerate(zip(sources, results, strict=True)):
        expected = _alone(model, source, **options)
        assert result.dtype == torch.int64 and result.shape == expected.shape, number
        assert torch.equal(result, expected), number
    assert bool(spans) == bool(refilling)


def test_a_token_that_pads_and_ends() -> None:
    model, sources = zoo.load("gpt2"), _sources("gpt2")
    end = model.generation_config.eos_token_id
    end = end if isinstance(end, int) else end[0]
    options = dict(num_beams=3, max_new_tokens=8, pad_token_id=end, eos_token_id=end)
    results = fastgen.generate(model, sources, batch_size=5, refill=True, **options)
    lengths = set()
    for source, result in zip(sources, results, strict=True):
        assert torch.equal(result, _alone(model, source, **options))
        lengths.add(result.shape[1] - len(source))
    assert len(lengths) > 1, "all went on to the end"


@pytest.mark.parametrize("pad", [None, zoo.PAD])
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_a_configuration_that_leaves_the_tokens_to_the_models(family: str, pad: int | None) -> None:
    """The host takes what a configuration does not say from the model's."""
    model, sources = copy.deepcopy(zoo.load(family)), _sources(family)
    model.generation_config.pad_token_id = pad
    options = dict(generation_config=GenerationConfig(num_beams=3, max_new_tokens=8))
    results = fastgen.generate(model, sources, batch_size=5, **options)
    expected = [_alone(model, source, **options) for source in sources]
    assert_equal(expected, results)
    prompts = [1 if family == "bart" else len(source) for source in sources]
    assert len({found.shape[1] - prompt for found, prompt in zip(expected, prompts, strict=True)}) > 1


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("pad", [zoo.PAD, "the end token"])
def test_stop_strings(pad: Any, beams: int) -> None:
    """What a stop string ends has no end token, even if it is padded with one."""
    model, sources = zoo.load("gpt2"), _sources("gpt2")
    words = {"abcdef": 0, **{f"w{number:02}": number for number in range(1, zoo.VOCAB)}}  # the host tries `abcdef`
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w03")))
    end = model.generation_config.eos_token_id
    end = end if isinstance(end, int) else end[0]
    options = dict(num_beams=beams, max_new_tokens=10, eos_token_id=end, pad_token_id=end if pad != zoo.PAD else pad)
    options |= dict(stop_strings=[f"w{number:02}" for number in range(4, 60, 4)], tokenizer=tokenizer)
    results = fastgen.generate(model, sources, batch_size=5, **options)
    expected = [_alone(model, source, **options) for source in sources]
    assert_equal(expected, results)
    lengths = {found.shape[1] - len(source) for found, source in zip(expected, sources, strict=True)}
    assert len(lengths) > 1 and any(int(found[0, -1]) != end for found in expected)


@pytest.mark.parametrize("refilling", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=3, max_length=20),
        dict(num_beams=2, min_length=16, max_new_tokens=14),
        dict(generation_config=GenerationConfig(num_beams=2, max_length=18)),
        dict(num_beams=1, max_length=20),
    ],
    ids=["most", "least", "configured", "greedy"],
)
def test_lengths_that_count_the_prompt(options: dict[str, Any], refilling: bool) -> None:
    """They would count the padding before it, too."""
    model, sources = zoo.load("llama"), _sources("llama")
    results = fastgen.generate(model, sources, batch_size=6, refill=refilling, **options)
    assert_equal([_alone(model, source, **options) for source in sources], results)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=3, max_new_tokens=10, encoder_repetition_penalty=6.0),
        dict(num_beams=1, max_new_tokens=30, no_repeat_ngram_size=1),
        dict(num_beams=3, max_new_tokens=30, no_repeat_ngram_size=1),
        dict(num_beams=2, max_new_tokens=20, encoder_no_repeat_ngram_size=1),
    ],
    ids=["penalty", "n-grams, greedy", "n-grams", "n-grams of the prompt"],
)
def test_padding_is_no_token_of_a_prompt(options: dict[str, Any]) -> None:
    """The host's processors take the padding before a shorter prompt for tokens of it: here it ends the outputs."""
    model, sources = zoo.load("llama"), _sources("llama")
    end = model.generation_config.eos_token_id
    options = options | dict(pad_token_id=end if isinstance(end, int) else end[0])
    results = fastgen.generate(model, sources, batch_size=6, **options)
    assert_equal([_alone(model, source, **options) for source in sources], results)


@pytest.mark.parametrize("is_old", [False, True], ids=["", "old"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_penalty_reaches_no_other_source(
    family: str, beams: int, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In older versions of the host it reaches as many rows as there are sources, be they beams of the first."""
    if is_old:
        monkeypatch.setattr(versions, "penalises_all_rows", lambda: False)
    model, generator = zoo.load(family), torch.Generator().manual_seed(7)
    sources = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (5, 7), generator=generator).tolist()
    options = dict(num_beams=beams, max_new_tokens=10, encoder_repetition_penalty=6.0)
    report.reset()
    results = fastgen.generate(model, sources, batch_size=6, **options)
    alone = beams > 1 and not versions.penalises_all_rows()
    assert [call.batch for call in report.calls()] == ([1] * 5 if alone else [5])
    assert_equal([_alone(model, source, **options) for source in sources], results)


def test_other_models_decode_batch_by_batch(spans: list[Any]) -> None:
    model, sources = zoo.load("bert2bert"), _sources("bert2bert")
    options = dict(num_beams=3, max_new_tokens=8, **zoo.FAMILIES["bert2bert"].generate)
    results = fastgen.generate(model, sources, batch_size=4, refill=True, **options)
    for source, result in zip(sources, results, strict=True):
        assert torch.equal(result, _alone(model, source, **options))
    assert not spans


@pytest.mark.parametrize("options", [dict(num_beams=1), dict(num_beams=3, use_cache=False)], ids=["greedy", "no cache"])
def test_calls_that_stay_alone_are_whole_batches(options: dict[str, Any], spans: list[Any]) -> None:
    model, sources = zoo.load("bart"), _sources("bart")
    report.reset()
    results = fastgen.generate(model, sources, batch_size=8, refill=True, max_new_tokens=8, **options)
    assert not spans and [call.batch for call in report.calls()] == [8, 8, 1]
    for source, result in zip(sources, results, strict=True):
        assert torch.equal(result, _alone(model, source, max_new_tokens=8, **options))


def test_kinds_of_sources_and_none(capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.load("bart")
    options: dict[str, Any] = dict(num_beams=2, max_new_tokens=6)
    assert fastgen.generate(model, [], **options) == []
    lists = _sources("bart")[:5]
    expected = fastgen.generate(model, lists, batch_size=1, **options)
    for sources in ([torch.tensor(source) for source in lists], tuple(map(tuple, lists))):
        results = fastgen.generate(model, sources, progress=True, return_dict_in_generate=False, **options)
        assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert "5 / 5 (100%)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sources=[[5, 6], []]), "source 1 has no tokens"),
        (dict(batch_size=0), "batch_size=0 is not 1 or more"),
        (dict(attention_mask=torch.ones(1, 2)), "attention_mask is not for fastgen.generate"),
        (dict(return_dict_in_generate=True), "return_dict_in_generate is not for fastgen.generate"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastgen.generate(zoo.load("bart"), **{"sources": [[5, 6]], "num_beams": 2, **arguments})


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_start_token_for_each_source(kind: Any, beams: int, refill: bool) -> None:
    """Sources are sorted by length, and their start tokens with them."""
    model, sources = zoo.load("bart"), _sources("bart")[:7]
    starts, options = [7, 9, 11, 13, 15, 17, 19], dict(num_beams=beams, max_new_tokens=4)
    results = fastgen.generate(
        model, sources, batch_size=3, refill=refill, decoder_start_token_id=kind(starts), **options
    )
    alone = [
        _alone(model, source, decoder_start_token_id=start, **options)
        for source, start in zip(sources, starts, strict=True)
    ]
    assert_equal(alone, results)
    with pytest.raises(ValueError, match="decoder_start_token_id has 6 rows for 7 sources"):
        fastgen.generate(model, sources, decoder_start_token_id=kind(starts[:6]))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_padding_that_the_model_generates(family: str, ends: bool) -> None:
    model, sources = zoo.load(family), _sources(family)
    pad = model.generation_config.pad_token_id
    options: dict[str, Any] = dict(num_beams=2, num_return_sequences=2, max_new_tokens=6, sequence_bias={(pad,): 12.0})
    options |= {} if ends else dict(eos_token_id=None, pad_token_id=None)
    results = fastgen.generate(model, sources, batch_size=6, **options)
    assert any(bool((result[:, -1] == pad).all()) for result in results)
    assert_equal([_alone(model, source, **options) for source in sources], results)


@pytest.mark.parametrize(
    "options",
    [
        dict(watermarking_config=transformers.WatermarkingConfig(context_width=4, bias=5.0), num_beams=2),
        dict(watermarking_config=transformers.WatermarkingConfig(context_width=2, seeding_scheme="selfhash", bias=5.0)),
        dict(bad_words_ids=[[1, word, end] for word in (20, 36) for end in range(5, 50)]),
        dict(sequence_bias=[[[1, 36, 20], 9.0]], num_beams=2),
    ],
    ids=["watermark", "watermark of the context", "bad words", "bias"],
)
def test_padding_is_no_part_of_a_sequence(options: dict[str, Any]) -> None:
    model, sources = zoo.load("llama"), [[20], *_sources("llama")]
    assert model.generation_config.pad_token_id == 1
    results = fastgen.generate(model, sources, batch_size=6, max_new_tokens=8, **options)
    assert_equal([_alone(model, source, max_new_tokens=8, **options) for source in sources], results)


def test_places_that_beam_search_does_not_fill() -> None:
    """With a trie of fewer sequences than beams the host goes on to the end, alone as beside others."""
    model = zoo.load("bart")
    trie = fastgen.Trie.per_sentence([[[9], [11]], [[9] * 9, [11] * 9, [13] * 9, [15] * 9]], eos_token_id=2)
    options = dict(num_beams=4, num_return_sequences=4, length_penalty=-1.0, max_new_tokens=14)
    sources = [[5, 6, 7], [8, 9, 10, 11]]
    results = fastgen.generate(model, sources, batch_size=2, prefix_allowed_tokens_fn=trie, **options)
    alone = [
        _alone(model, source, prefix_allowed_tokens_fn=trie.select([number]), **options)
        for number, source in enumerate(sources)
    ]
    assert not (alone[0][:, 1:] == 2).any(1).all(), "all places are filled"
    assert results[0].shape == alone[0].shape and torch.equal(results[0][:2], alone[0][:2])
    width = results[1].shape[1]
    assert torch.equal(results[1], alone[1][:, :width]) and bool((alone[1][:, width:] != 9).all())
