"""Generation options, alone and combined: fastgen's output is the stock host's.

The combinations are a seeded random product. A failure's id names model, seed and options, so that
`pytest -k bart-17` runs it again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.modeling_outputs import BaseModelOutput

from fastgen.decoding.beam_search import BeamSearch
from fastgen.optimizer.transformers import request, versions
from fastgen.optimizer.transformers.versions import CACHE

MODELS = ("bart", "t5", "gpt2", "llama")
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
TOKENS = dict(return_dict_in_generate=False)


def both_ways(model: Any, inputs: dict[str, Any], tier: str = "auto", **options: Any) -> Any:
    """Compare without scores, when finished sentences may leave, and with; returns stock's detailed output."""
    harness.compare(model, inputs, tier=tier, **options, **TOKENS)
    return harness.compare(model, inputs, tier=tier, **options, **DETAILS)


# ---------------------------------------------------------------------------------------------- custom processors
class Nudge(LogitsProcessor):
    """Local to a row: prefers tokens that share the last one's parity."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        same = (torch.arange(scores.shape[-1]) % 2) == (input_ids[:, -1:] % 2)
        return scores + same * 0.7


class Ensemble(LogitsProcessor):
    """Not local to a row: every row sees the mean over the batch, so rows must be there, all, and in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Size, torch.Size, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append((input_ids.shape, scores.shape, input_ids.clone()))
        rows = torch.arange(scores.shape[0])[:, None]
        return scores + 0.1 * scores.clamp(min=-20).mean(0, keepdim=True) - 0.01 * (rows % 5)


class EnoughOf(StoppingCriteria):
    """Stops a hypothesis that holds three tokens below 20 among those generated."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.shapes: list[torch.Size] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shapes.append(input_ids.shape)
        return (input_ids[:, self.prompt :] < 20).sum(1) >= 3


def only_some(batch: int, ids: torch.Tensor) -> list[int]:
    """A third of the vocabulary, depending on the sentence and on the last token."""
    return [token for token in range(zoo.FIRST_WORD, zoo.VOCAB) if (token + batch + int(ids[-1])) % 3]


# ---------------------------------------------------------------------------------------------- the product
# Each entry may add one setting to a combination; the value is drawn with the combination's own generator.
Draw = Callable[[random.Random], Any]
OPTIONS: dict[str, Draw] = {
    "num_return_sequences": lambda draw: draw.choice([1, 2, 3]),  # at most the beams, see below
    "length_penalty": lambda draw: draw.choice([-1.5, -0.4, 0.0, 0.6, 2.0]),
    "early_stopping": lambda draw: draw.choice([True, False, "never"]),
    "min_new_tokens": lambda draw: draw.choice([2, 5]),
    "min_length": lambda draw: draw.choice([4, 12]),
    "eos_token_id": lambda draw: draw.sample(range(zoo.FIRST_WORD, zoo.VOCAB - 1), draw.choice([1, 2, 4])),
    "forced_bos_token_id": lambda draw: draw.randrange(zoo.FIRST_WORD, zoo.VOCAB - 1),
    "forced_eos_token_id": lambda draw: draw.randrange(zoo.FIRST_WORD, zoo.VOCAB - 1),
    "no_repeat_ngram_size": lambda draw: draw.choice([1, 2, 3]),
    "encoder_no_repeat_ngram_size": lambda draw: draw.choice([1, 2]),
    "repetition_penalty": lambda draw: draw.choice([0.8, 1.2, 2.0]),
    "encoder_repetition_penalty": lambda draw: draw.choice([0.8, 1.5]),
    "bad_words_ids": lambda draw: [[draw.randrange(5, 60)], [draw.randrange(5, 60), draw.randrange(5, 60)]],
    "suppress_tokens": lambda draw: draw.sample(range(5, 60), 6),
    "begin_suppress_tokens": lambda draw: draw.sample(range(5, 60), 6),
    "sequence_bias": lambda draw: {(draw.randrange(5, 60),): -3.0, (draw.randrange(5, 60), 9): 4.0},
    "exponential_decay_length_penalty": lambda draw: (3, 1.3),
    "prefix_allowed_tokens_fn": lambda draw: only_some,
    "logits_processor": lambda draw: draw.choice([_nudged, _ensembled]),
    "stopping_criteria": lambda draw: _enough,
    "renormalize_logits": lambda draw: True,
    "guidance_scale": lambda draw: draw.choice([0.5, 1.8]),
}
if versions.PREFILLS:  # else the host runs it
    OPTIONS["remove_invalid_values"] = lambda draw: True
SAMPLING: dict[str, Draw] = {
    "top_k": lambda draw: draw.choice([5, 20]),
    "top_p": lambda draw: draw.choice([0.7, 0.95]),
    "temperature": lambda draw: draw.choice([0.6, 1.4]),
    "min_p": lambda draw: 0.02,
    "typical_p": lambda draw: 0.9,
}


def _nudged() -> LogitsProcessorList:
    return LogitsProcessorList([Nudge()])


def _ensembled() -> LogitsProcessorList:
    return LogitsProcessorList([Ensemble()])


def _enough() -> StoppingCriteriaList:
    return StoppingCriteriaList([EnoughOf(prompt=1)])


def _combination(name: str, seed: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Shape of the batch, options for generate, and tier, all drawn from (name, seed)."""
    draw = random.Random(f"{name}-{seed}")
    shape = dict(
        seed=draw.randrange(1000),
        batch=draw.choice([1, 2, 3, 5]),
        length=draw.choice([2, 7, 12]),
        padding=draw.choice(["left", "right"]),
        ragged=draw.random() < 0.7,
    )
    options: dict[str, Any] = dict(num_beams=draw.randint(2, 8), max_new_tokens=draw.choice([3, 9, 15]))
    for option in draw.sample(list(OPTIONS), draw.randint(1, 6)):
        options[option] = OPTIONS[option](draw)
    if draw.random() < 0.25:
        options["do_sample"] = True
        for option in draw.sample(list(SAMPLING), draw.randint(1, 3)):
            options[option] = SAMPLING[option](draw)
    if "num_return_sequences" in options:
        options["num_return_sequences"] = min(options["num_return_sequences"], options["num_beams"])
    return shape, options, draw.choice(["auto", "fast", "compat"])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", MODELS)
def test_combination(name: str, seed: int, request: pytest.FixtureRequest) -> None:
    shape, options, tier = _combination(name, seed)
    request.node.add_report_section("setup", "options", f"{shape} {options} tier={tier}")
    model, inputs = zoo.load(name), zoo.inputs_for(name, **shape)
    try:
        harness.run_stock(model, inputs, **options, **DETAILS)
    except (ValueError, RuntimeError, IndexError) as error:  # then fastgen must refuse likewise
        with pytest.raises(type(error)) as raised:
            harness.run_fastgen(model, inputs, tier=tier, **options, **DETAILS)
        assert str(raised.value) == str(error)
        return
    both_ways(model, inputs, tier, **options)


def test_combinations_cover_every_option() -> None:
    """The product above, as drawn, reaches each option on an encoder-decoder and on a decoder-only model."""
    for pair in (("bart", "t5"), ("gpt2", "llama")):
        drawn = {option for name in pair for seed in range(20) for option in _combination(name, seed)[1]}
        assert drawn >= OPTIONS.keys() | SAMPLING.keys() | {"do_sample"}


# ---------------------------------------------------------------------------------------------- one by one
models = pytest.mark.parametrize("name", MODELS)
tiers = pytest.mark.parametrize("tier", harness.TIERS)


@tiers
@pytest.mark.parametrize("beams", range(2, 9))
@models
def test_beams(name: str, beams: int, tier: str) -> None:
    both_ways(zoo.load(name), zoo.inputs_for(name, batch=2), tier, num_beams=beams, max_new_tokens=10)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": -6.0, "max_new_tokens": 20},
        {"length_penalty": -10.0, "max_new_tokens": 8, "num_return_sequences": 3},
        {"no_repeat_ngram_size": 1, "few": 15, "min_new_tokens": 39, "max_new_tokens": 40, "num_return_sequences": 3},
    ],
    ids=["sinks", "sinks soon", "dead end"],
)
def test_a_search_that_ends_with_places_left(options: dict[str, Any], early_stopping: bool | str) -> None:
    """Scores fall below the mark of the dead, or no token is left: the host returns what never ended."""
    model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2")
    options = {"num_beams": 3, "early_stopping": early_stopping, **options}
    if few := options.pop("few", 0):
        options["suppress_tokens"] = list(range(few, model.config.vocab_size))
    harness.compare(model, inputs, tier="fast", **options)


@tiers
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 3.0])
@models
def test_stopping(name: str, length_penalty: float, early_stopping: bool | str, tier: str) -> None:
    options = dict(num_beams=4, num_return_sequences=4, max_new_tokens=18, length_penalty=length_penalty)
    both_ways(zoo.load(name), zoo.inputs_for(name, batch=6), tier, early_stopping=early_stopping, **options)


@tiers
@pytest.mark.parametrize("padding", ["left", "right"])
@models
def test_padding(name: str, padding: str, tier: str) -> None:
    for batch, length in ((1, 1), (4, 11), (5, 6)):
        inputs = zoo.inputs_for(name, batch=batch, length=length, padding=padding)
        both_ways(zoo.load(name), inputs, tier, num_beams=4, max_new_tokens=9)


@models
def test_without_a_mask(name: str) -> None:
    inputs = {"input_ids": zoo.inputs_for(name, ragged=False)["input_ids"]}
    both_ways(zoo.load(name), inputs, num_beams=3, max_new_tokens=8)


@tiers
@models
def test_one_new_token(name: str, tier: str) -> None:
    output = both_ways(
        zoo.load(name), zoo.inputs_for(name), tier, num_beams=4, num_return_sequences=2, max_new_tokens=1
    )
    assert output.beam_indices.shape[1] == 1


@tiers
@models
def test_first_step_and_never(name: str, tier: str) -> None:
    """One sentence ends at its first step; another never does, and holds the batch until the maximum."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=4)
    endless = harness.run_stock(model, inputs, num_beams=4, max_new_tokens=14, eos_token_id=None, **DETAILS)
    prompt = endless.sequences.shape[1] - endless.beam_indices.shape[1]
    firsts, used = endless.sequences[:, prompt], endless.sequences[:, prompt:]
    late = next(row for row in range(4) if not (used[row, :-1] == firsts[(row + 1) % 4]).any())
    eos = int(firsts[(late + 1) % 4])
    options = dict(num_beams=4, max_new_tokens=14, eos_token_id=eos, length_penalty=-3.0, early_stopping=True)
    output = both_ways(model, inputs, tier, **options)
    lengths = zoo.finishing_steps(output)
    assert min(lengths) == 1, f"no sentence ends at once: {lengths}"


@models
def test_processors_see_what_stock_shows_them(name: str) -> None:
    """The same calls, in the same order, with all rows, in either tier: `[B*M, V]` from the first step on."""
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    for tier in harness.TIERS:
        mine, theirs = Ensemble(), Ensemble()
        options = dict(num_beams=3, max_new_tokens=9, early_stopping=True)
        stopped_mine, stopped_theirs = EnoughOf(4), EnoughOf(4)
        with harness.fastgen.disabled():
            theirs_output = model.generate(
                **inputs, **options, logits_processor=LogitsProcessorList([theirs]),
                stopping_criteria=StoppingCriteriaList([stopped_theirs]),
            )  # fmt: skip
        with harness.configured(tier=tier, strict=True):
            output = model.generate(
                **inputs, **options, logits_processor=LogitsProcessorList([mine]),
                stopping_criteria=StoppingCriteriaList([stopped_mine]),
            )  # fmt: skip
        assert torch.equal(output, theirs_output)
        assert len(mine.seen) == len(theirs.seen) > 2
        for (ids, scores, tokens), (stock_ids, stock_scores, stock_tokens) in zip(mine.seen, theirs.seen, strict=True):
            assert (ids, scores) == (stock_ids, stock_scores)
            assert torch.equal(tokens, stock_tokens)
        assert stopped_mine.shapes == stopped_theirs.shapes


# ---------------------------------------------------------------------------------------------- further inputs
@tiers
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_decoder_prompts(name: str, tier: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(zoo.FIRST_WORD, 60, (3, 5), generator=generator)
    prompt[:, 0] = zoo.START
    options = dict(num_beams=4, max_new_tokens=10)
    both_ways(model, {**inputs, "decoder_input_ids": prompt}, tier, **options)
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    both_ways(model, {**inputs, "decoder_input_ids": prompt, "decoder_attention_mask": mask}, tier, **options)


@tiers
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_encoder_outputs_of_the_user(name: str, tier: str) -> None:
    """Used, and handed back as they were (stock itself expands them in place)."""
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    hidden = model.get_encoder()(**inputs).last_hidden_state
    options = dict(num_beams=4, max_new_tokens=10)
    given = {"attention_mask": inputs["attention_mask"]}
    for details in (TOKENS, DETAILS):
        mine = BaseModelOutput(last_hidden_state=hidden.clone())
        stock = harness.run_stock(
            model,
            {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=hidden.clone())},
            **options,
            **details,
        )
        # called directly: the harness would copy what must not be changed
        with harness.configured(tier=tier, strict=True):
            output = model.generate(**given, encoder_outputs=mine, **options, **details)
        harness.assert_same(stock, output)
        assert mine.last_hidden_state.shape == hidden.shape, "the user's encoder_outputs were expanded in place"
        assert torch.equal(mine.last_hidden_state, hidden)


@tiers
@models
def test_embeddings_instead_of_tokens(name: str, tier: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    if model.config.is_encoder_decoder:
        embeddings = model.get_encoder().get_input_embeddings()(inputs["input_ids"])
    else:
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
    given = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
    both_ways(model, given, tier, num_beams=4, max_new_tokens=10)


@tiers
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_guidance_with_a_negative_prompt(name: str, tier: str) -> None:
    """Classifier-free guidance runs the model again, on its own cache, inside a logits processor."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=2, ragged=False)
    negative = zoo.inputs_for(name, seed=3, batch=2, ragged=False)
    rows = {f"negative_prompt_{key[6:] if key == 'input_ids' else key}": value for key, value in negative.items()}
    given = {**inputs, "negative_prompt_ids": rows["negative_prompt_ids"].repeat_interleave(3, 0)}
    both_ways(model, given, tier, num_beams=3, max_new_tokens=8, guidance_scale=1.7)


@tiers
@models
def test_sampling(name: str, tier: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    for options in (dict(top_k=7), dict(top_p=0.8, temperature=1.5), dict(top_k=0), dict(top_p=0.3)):
        both_ways(
            model,
            inputs,
            tier,
            num_beams=4,
            num_return_sequences=2,
            max_new_tokens=12,
            do_sample=True,
            **options,
        )


@models
def test_sampling_leaves_the_random_stream_where_stock_leaves_it(name: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    options = dict(num_beams=3, max_new_tokens=10, do_sample=True, top_k=20)
    harness.run_stock(model, inputs, **options)
    stock = torch.rand(3)
    harness.run_fastgen(model, inputs, **options)
    assert torch.equal(torch.rand(3), stock)


@models
def test_a_generation_config(name: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    config = copy.deepcopy(model.generation_config)
    config.update(num_beams=5, max_new_tokens=9, num_return_sequences=2)
    both_ways(model, {**inputs, "generation_config": config})


@tiers
@models
def test_cache_returned(name: str, tier: str) -> None:
    """The returned cache is the one stock would return: to be looked at, or to go on from."""
    options = dict(num_beams=3, max_new_tokens=6, min_new_tokens=6, **DETAILS)
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, tier=tier, **options)
    caches = (getattr(stock, CACHE), getattr(output, CACHE))
    if model.config.is_encoder_decoder:
        caches = tuple(cache.self_attention_cache for cache in caches)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for theirs, mine in zip(caches[0].layers, caches[1].layers, strict=True):
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=harness.TOLERANCE)
            assert getattr(mine, name).is_contiguous() == getattr(theirs, name).is_contiguous(), "`view` works as there"


@pytest.mark.parametrize("option", ["suppress_tokens", "begin_suppress_tokens"])
def test_nothing_to_suppress(option: str) -> None:
    harness.compare(zoo.load("bart"), zoo.inputs_for("bart"), num_beams=3, max_new_tokens=6, **{option: []})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_processor_of_another_dtype(dtype: torch.dtype) -> None:
    def convert(input_ids: Any, scores: Any) -> Any:
        return scores.to(dtype)

    processors = LogitsProcessorList([convert])
    harness.compare(
        zoo.load("bart"), zoo.inputs_for("bart"), num_beams=3, max_new_tokens=6, logits_processor=processors
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_ngrams_banned_in_scores_of_another_dtype(beams: int) -> None:
    """The user's own list may have the host's processor after one that changes the dtype."""

    def convert(input_ids: Any, scores: Any) -> Any:
        return scores.to(torch.float64)

    processors = LogitsProcessorList([convert, logits_process.NoRepeatNGramLogitsProcessor(2)])
    options = dict(num_beams=beams, max_new_tokens=12, logits_processor=processors)
    harness.compare(zoo.load("bart"), zoo.inputs_for("bart"), **options, return_dict_in_generate=False)


@pytest.mark.parametrize("beams", [1, 3])
def test_the_hosts_reminder_of_the_models_positions(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host says so where it asks the criterion of length."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=40)
    longest = model.config.max_position_embeddings + 6
    options = dict(num_beams=beams, max_length=longest, eos_token_id=zoo.VOCAB)
    said = []
    for run in (harness.run_stock, harness.run_fastgen):
        logger = mock.Mock()
        monkeypatch.setattr(stopping_criteria, "logger", logger)
        run(model, inputs, **options)
        said.append(sorted({call.args[0] for call in logger.warning_once.call_args_list}))
    assert said[0] == said[1] and len(said[0]) == 1


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_no_token_left_to_renormalise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then scores are NaN, which win over those of hypotheses that have finished: no sentence may leave before."""
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=4)
    vocabulary = model.config.vocab_size
    # A few words are left, so that some sentences finish before others have no word left.
    options = dict(
        num_beams=3, num_return_sequences=2, length_penalty=0.0, no_repeat_ngram_size=1, renormalize_logits=True
    )
    options |= dict(suppress_tokens=list(range(12, vocabulary)), max_new_tokens=30, eos_token_id=[6])
    tokens = harness.compare(model, inputs, **options, return_dict_in_generate=False)
    monkeypatch.setattr(request.Request, "_may_divide_by_nothing", False)
    others = harness.run_fastgen(model, inputs, **options, return_dict_in_generate=False)[0]
    assert not torch.equal(tokens, others)  # or nothing is shown


@pytest.mark.parametrize(
    "options",
    [
        dict(max_new_tokens=20, exponential_decay_length_penalty=(2, 8.0), no_repeat_ngram_size=1),
        dict(max_new_tokens=44, exponential_decay_length_penalty=(2, 2.0)),
        dict(max_new_tokens=16, sequence_bias={(42, 11, 37, 2, 25): 1e12}),
        dict(max_new_tokens=16, sequence_bias={(42, 11): 4e3}, length_penalty=-4.0),
    ],
    ids=["decay", "decay alone", "bias", "bias times length"],
)
def test_scores_that_rise_above_finished_hypotheses(options: dict[str, Any]) -> None:
    """The host puts a finished sentence 1e9 above what comes later, while another sentence goes on."""
    harness.compare(
        zoo.load("llama"), zoo.inputs_for("llama", batch=6), num_beams=3, early_stopping=True, **TOKENS, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(exponential_decay_length_penalty=(15, 1.01)),
        dict(sequence_bias={(9,): 3.0}),
        dict(bad_words_ids=[[9]], length_penalty=-2.0),
        dict(exponential_decay_length_penalty=(5, 1.2), sequence_bias={(9,): 3.0}, no_repeat_ngram_size=2),
    ],
)
def test_what_raises_scores_a_little_lets_sentences_leave(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving: list[bool] = []
    evict = BeamSearch.evict
    monkeypatch.setattr(BeamSearch, "evict", lambda *args: leaving.append(True) or evict(*args))
    inputs = zoo.inputs_for("llama", batch=6)
    harness.compare(zoo.load("llama"), inputs, num_beams=3, max_new_tokens=30, early_stopping=True, **TOKENS, **options)
    older = "exponential_decay_length_penalty" in options and not versions.decays_finite_scores()
    assert leaving or (older and len(options) > 1)
