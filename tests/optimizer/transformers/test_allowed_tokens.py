"""Searches whose outputs a `fastgen.Trie` lists, or a function of the user's: what stock makes of them, without asking
the trie, and with as many questions to the function."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process

import fastgen
from fastgen import Trie
from fastgen.decoding.beam_search import BeamSearch
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import speculation, tries
from fastgen.patching import hosts
from fastgen.replay import statistics

WORDS, END = 400, zoo.UNUSED  # enough words that torch.topk keeps a heap of the candidates
MODELS = {
    "bart": ("BartForConditionalGeneration", "BartConfig", zoo.ENCODER_DECODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", zoo.T5),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", zoo.GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", zoo.GROUPED),
}


def model_of(name: str) -> Any:
    if name == "t5" and not versions.FINDS_EAGER:
        pytest.skip("T5 falls back on this version of transformers")
    return _built(name)


@functools.cache
def _built(name: str) -> Any:
    cls, config, base = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        model = zoo._model(cls, config, base, vocab_size=WORDS)().eval().requires_grad_(False)
        zoo._roughen(model)
    model.generation_config.eos_token_id = END
    # Families that are tried first, as on transformers 4.57, are tried now: those searches are not to be counted.
    for batch in (1, 3):
        model.generate(**zoo.text(model, batch=batch), num_beams=2, max_new_tokens=2)
    return model


def sequences(seed: int, count: int, words: int = 30, longest: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 5 + words) for _ in range(rng.randrange(longest + 1))] for _ in range(count)]


SETS = {
    "many": sequences(1, 3000, words=395),
    "some": sequences(2, 60),
    "few": sequences(3, 4, words=4),
    "one": [[7, 8, 9]],
    "nothing": [[]],
    "flat": [[word] for word in range(5, 395)],
}
DENSE = ("many", "flat")  # almost any token may be the first: of a function a mask is made


def prompt_of(model: Any, inputs: dict[str, Any]) -> int:
    return 1 if model.config.is_encoder_decoder else int(inputs["input_ids"].shape[1])


def trie_for(model: Any, inputs: dict[str, Any], kind: str) -> Trie:
    return Trie(SETS[kind], eos_token_id=END).after(prompt_of(model, inputs))


def dictionary(kind: str, prompt: int) -> Any:
    root: dict[int, Any] = {}
    for sequence in SETS[kind]:
        node = root
        for token in [*sequence, END]:
            node = node.setdefault(token, {})

    def allowed(sentence: int, tokens: torch.Tensor) -> list[int]:
        node: Any = root
        for token in tokens[prompt:].tolist():
            node = node.get(token, {})
        return list(node) or [END]

    return allowed


def allowed_by(how: str, model: Any, inputs: dict[str, Any], kind: str) -> Any:
    return trie_for(model, inputs, kind) if how == "trie" else dictionary(kind, prompt_of(model, inputs))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps our search chose among the allowed tokens, and how many among all; and how often the trie was
    asked as a function."""
    for name in MODELS:
        _built(name)
    counts: Counter[str] = Counter()
    among, choose, called = BeamSearch.choose_among, BeamSearch.choose, Trie.__call__

    def counted_among(self: BeamSearch, *args: Any) -> Any:
        found = among(self, *args)
        counts["among"] += found is not None
        return found

    def counted(self: BeamSearch, *args: Any, **kwargs: Any) -> Any:
        counts["all"] += 1
        return choose(self, *args, **kwargs)

    def asked(self: Trie, *args: Any) -> Any:
        counts["asked"] += hosts.is_on()
        return called(self, *args)

    monkeypatch.setattr(BeamSearch, "choose_among", counted_among)
    monkeypatch.setattr(BeamSearch, "choose", counted)
    monkeypatch.setattr(Trie, "__call__", asked)
    return counts


def compare(model: Any, inputs: dict[str, Any], tier: str = "auto", **options: Any) -> Any:
    """Tokens; and tokens with the scores of whole hypotheses alone, which our commands ask for."""
    stock = harness.compare(model, inputs, tier=tier, **options, return_dict_in_generate=False)
    if options.get("num_beams", 1) > 1:
        wants = dict(return_dict_in_generate=True, output_scores=True)
        scores = harness.run_stock(model, inputs, **options, **wants).sequences_scores
        config = copy.deepcopy(model.generation_config)
        config._fastgen_sequence_scores_only = True
        found, _ = harness.run_fastgen(
            model, inputs, tier=tier, strict=True, **options, **wants, generation_config=config
        )
        assert torch.equal(stock, found.sequences)
        harness._assert_close("sequences_scores", scores, found.sequences_scores, harness.TOLERANCE)
    return stock


def assert_native(steps: Counter[str]) -> None:
    assert steps["among"] and not steps["all"] and not steps["asked"], steps


# ---------------------------------------------------------------------------------------------- beam search
@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("kind", sorted(SETS))
@pytest.mark.parametrize("beams", [4, 10, 50])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_beam_search(name: str, beams: int, kind: str, how: str, steps: Counter[str]) -> None:
    """Few outputs for many beams, among them: most beams are then dead, and which is chosen is up to torch.topk."""
    model = model_of(name)
    inputs = zoo.text(model, seed=beams)
    stock = compare(
        model,
        inputs,
        num_beams=beams,
        num_return_sequences=min(beams, 5),
        max_new_tokens=8,
        prefix_allowed_tokens_fn=allowed_by(how, model, inputs, kind),
    )
    if how == "function" and kind in DENSE:
        assert steps["among"] and steps["all"] == 2, steps  # the first step of both calls
    else:
        assert_native(steps)
    # The best is one of them (of sentences that stock has finished with a real score).
    trie = trie_for(model, inputs, kind)
    for best in stock[:: min(beams, 5)]:
        generated = best[trie.prompt_length :].tolist()
        assert END in generated and generated[: generated.index(END) + 1] in trie


OPTIONS: dict[str, dict[str, Any]] = {
    "early": dict(early_stopping=True),
    "never": dict(early_stopping="never", length_penalty=-0.5),
    "penalty": dict(length_penalty=2.0),
    "ngrams": dict(no_repeat_ngram_size=2),
    "min_length": dict(min_new_tokens=3),
    "repetition": dict(repetition_penalty=1.4),
    "bad_words": dict(bad_words_ids=[[6], [7, 8]]),
    "suppressed": dict(suppress_tokens=[6, 9, 11]),
    "begin": dict(begin_suppress_tokens=[5, END]),
    "two_ends": dict(eos_token_id=[END, 8]),
    "cut": dict(max_new_tokens=2),
    "all": dict(no_repeat_ngram_size=2, min_new_tokens=2, repetition_penalty=0.8, suppress_tokens=[10]),
}


@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("option", sorted(OPTIONS))
@pytest.mark.parametrize("kind", ["many", "some", "few"])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_options(name: str, kind: str, option: str, how: str, steps: Counter[str]) -> None:
    model = model_of(name)
    inputs = zoo.text(model, seed=5)
    allowed = allowed_by(how, model, inputs, kind)
    options = {"num_beams": 5, "num_return_sequences": 3, "max_new_tokens": 8, **OPTIONS[option]}
    compare(model, inputs, **options, prefix_allowed_tokens_fn=allowed)
    assert steps["among"] and not steps["asked"], steps


# These act after the trie's, on all tokens or at certain steps alone.
AFTER: dict[str, dict[str, Any]] = {
    "forced_bos": dict(forced_bos_token_id=6),
    "forced_eos": dict(forced_eos_token_id=END),
    "decay": dict(exponential_decay_length_penalty=(2, 1.2)),
    "normalised": dict(renormalize_logits=True),
}
if versions.PREFILLS:  # else the host runs it
    AFTER["invalid"] = dict(remove_invalid_values=True)


@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("option", sorted(AFTER))
@pytest.mark.parametrize("kind", ["many", "few"])
@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_what_acts_after_the_trie(name: str, kind: str, option: str, how: str, steps: Counter[str]) -> None:
    model = model_of(name)
    inputs = zoo.text(model, seed=6)
    allowed = allowed_by(how, model, inputs, kind)
    steps_taken = {"max_new_tokens": 2 if option == "forced_eos" else 7}
    compare(model, inputs, num_beams=4, **steps_taken, **AFTER[option], prefix_allowed_tokens_fn=allowed)
    assert not steps["asked"]
    if how == "trie" or kind not in DENSE:
        assert bool(steps["among"]) == option.startswith("forced")  # which leave the other steps alone
    assert bool(steps["all"]) == (option != "forced_bos" or name == "bart" or (how == "function" and kind in DENSE))


def test_after_a_forced_token(steps: Counter[str]) -> None:
    """The prompt of a model that is forced to begin with a language has two tokens."""
    model = model_of("bart")
    inputs = zoo.text(model, seed=6)
    trie = Trie(SETS["some"], eos_token_id=END).after(2)
    stock = compare(model, inputs, num_beams=4, max_new_tokens=9, forced_bos_token_id=6, prefix_allowed_tokens_fn=trie)
    assert (stock[:, 1] == 6).all()
    assert all(row[2 : row.index(END) + 1] in trie for row in stock.tolist())
    assert steps["among"] and not steps["asked"]


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_of_their_own(name: str, beams: int, steps: Counter[str]) -> None:
    """With sentences that leave early."""
    model = model_of(name)
    inputs = zoo.text(model, seed=8, batch=5)
    sets = [SETS["one"], SETS["some"], [[9] * 12], SETS["few"], SETS["many"]]
    trie = Trie.per_sentence(sets, eos_token_id=END).after(prompt_of(model, inputs))
    stock = compare(
        model, inputs, num_beams=beams, max_new_tokens=14, early_stopping=beams > 1, prefix_allowed_tokens_fn=trie
    )
    assert stock[0, trie.prompt_length :][:4].tolist() == [7, 8, 9, END]
    assert stock[2, trie.prompt_length :][:13].tolist() == [9] * 12 + [END]
    assert not steps["asked"] and bool(steps["among"]) == (beams > 1)


def test_left_padding(steps: Counter[str]) -> None:
    model = model_of("llama")
    inputs = zoo.text(model, seed=9, batch=4, length=13)
    assert not inputs["attention_mask"].all()
    compare(model, inputs, num_beams=10, max_new_tokens=8, prefix_allowed_tokens_fn=trie_for(model, inputs, "some"))
    assert_native(steps)


def asked_of(
    run: Any, model: Any, inputs: dict[str, Any], function: Any, **options: Any
) -> tuple[Any, list[list[int]]]:
    """What `run` returns or raises, and all that the function was asked."""
    asked: list[list[int]] = []

    def noted(sentence: int, tokens: torch.Tensor) -> Any:
        asked.append([sentence, *tokens.tolist()])
        return function(sentence, tokens)

    try:
        found = run(model, inputs, **options, prefix_allowed_tokens_fn=noted, return_dict_in_generate=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}", asked
    return found[0] if isinstance(found, tuple) else found, asked


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_function_is_asked_as_by_stock(name: str, batch: int, steps: Counter[str]) -> None:
    """With a trie of dictionaries, stock does what fastgen does with a Trie; what is asked, and how often, is the same,
    also after the first sentence has finished."""
    model = model_of(name)
    inputs = zoo.text(model, seed=3, batch=batch)
    options = dict(num_beams=6, num_return_sequences=6, max_new_tokens=8)
    plain = dictionary("some", prompt_of(model, inputs))
    stock = asked_of(harness.run_stock, model, inputs, plain, **options)
    found = asked_of(harness.run_fastgen, model, inputs, plain, **options)
    assert torch.equal(stock[0], found[0]) and stock[1] == found[1] and len(stock[1]) > 6 * batch
    assert_native(steps)
    trie = trie_for(model, inputs, "some")
    options["return_dict_in_generate"] = False
    by_trie, _ = harness.run_fastgen(model, inputs, **options, prefix_allowed_tokens_fn=trie)
    assert torch.equal(stock[0], by_trie)


MANY = sorted(random.Random(4).sample(range(5, 395), 40))
# What a function may return, and whether it is chosen among its numbers.
ANSWERS: dict[str, tuple[Any, bool]] = {
    "unsorted": (MANY[::-1], True),
    "twice": (MANY + MANY[:9], True),
    "numpy numbers": ([*np.array(MANY)], True),
    "a bool among them": ([True, *MANY], True),
    "from the end": ([-3, *MANY], False),
    "tuple": (tuple(MANY), False),
    "tensor": (torch.tensor(MANY), False),
    "array": (np.array(MANY), False),
    "range": (range(7, 60), False),
    "mask": (torch.arange(WORDS) % 9 == 1, False),
    "bools": ([number % 9 == 1 for number in range(WORDS)], False),
    "all": ([*range(WORDS)], False),
    "nested": ([[*MANY]], False),
}
WRONG: dict[str, Any] = {
    "nothing": [],
    "too large": [5, WORDS],
    "too small": [5, -WORDS - 1],
    "none": None,
    "number": 5,
    "floats": [5.0, 6.0],
    "words": ["a", "b"],
    "ragged": [[5], [6, 7]],
    "generator": (number for number in MANY),  # has no length
    "keys": dict.fromkeys(MANY).keys(),  # has a length, and cannot be copied
    "view": memoryview(bytes(range(5, 45))),
}


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_what_a_function_may_return(kind: str, steps: Counter[str]) -> None:
    model = model_of("gpt2")
    inputs = zoo.text(model, seed=5)
    answer, is_native = ANSWERS[kind]

    def function(sentence: int, tokens: torch.Tensor) -> Any:
        return [*answer, END] if type(answer) is list and kind not in ("bools", "nested") else answer

    options = dict(num_beams=4, num_return_sequences=3, max_new_tokens=6)
    stock = asked_of(harness.run_stock, model, inputs, function, **options)
    found = asked_of(harness.run_fastgen, model, inputs, function, **options)
    assert type(stock[0]) is torch.Tensor, stock[0]
    assert torch.equal(stock[0], found[0]) and stock[1] == found[1]
    assert bool(steps["among"]) == is_native and bool(steps["all"]) != is_native


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", sorted(WRONG))
def test_what_a_function_must_not_return(kind: str, first: bool) -> None:
    """The host's error, for the first row or for one in the midst of a batch."""
    model = model_of("gpt2")
    inputs = zoo.text(model, seed=5)

    def function(sentence: int, tokens: torch.Tensor) -> Any:
        return WRONG[kind] if first or sentence == 1 else MANY

    options = dict(num_beams=4, max_new_tokens=6)
    stock, _ = asked_of(harness.run_stock, model, inputs, function, **options)
    found, _ = asked_of(harness.run_fastgen, model, inputs, function, **options)
    if type(stock) is torch.Tensor:  # some versions of torch take some of them
        assert torch.equal(stock, found)
    else:
        assert stock == found


def test_an_error_of_a_function() -> None:
    class OwnError(Exception):
        pass

    def function(sentence: int, tokens: torch.Tensor) -> Any:
        if len(tokens) > 8:
            raise OwnError("mine")
        return MANY

    model = model_of("llama")
    inputs = zoo.text(model, seed=5)
    options = dict(num_beams=4, max_new_tokens=20)
    stock = asked_of(harness.run_stock, model, inputs, function, **options)
    assert asked_of(harness.run_fastgen, model, inputs, function, **options) == stock
    assert stock[0] == "OwnError: mine"


class Infinite(LogitsProcessor):
    """Makes the score of one token infinite, or NaN, though it is not allowed."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:: 1 + input_ids.shape[1] % 2, 397] = self.value
        return scores


@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_processor_before_that_makes_no_numbers(value: float, how: str, steps: Counter[str]) -> None:
    model = model_of("gpt2")
    inputs = zoo.text(model, seed=6)
    allowed = allowed_by(how, model, inputs, "some")

    def processors() -> LogitsProcessorList:
        return LogitsProcessorList([Infinite(value), logits_process.PrefixConstrainedLogitsProcessor(allowed, 4)])

    options = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, return_dict_in_generate=False)
    harness.compare(model, inputs, **options, logits_processor=processors)
    assert bool(steps["among"]) == (value == -float("inf"))


@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_few_tokens(name: str, steps: Counter[str]) -> None:
    """With 61 tokens torch.topk keeps no heap of the candidates."""
    model = zoo.load(name)
    inputs = zoo.text(model, seed=3)
    end = model.generation_config.eos_token_id
    chosen = [[word for word in sequence if word != end] for sequence in SETS["some"]]
    trie = Trie(chosen, eos_token_id=end).after(prompt_of(model, inputs))
    compare(model, inputs, num_beams=4, num_return_sequences=4, max_new_tokens=8, prefix_allowed_tokens_fn=trie)
    assert steps["all"] and not steps["among"] and not steps["asked"]


class Nudge(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.5 * (torch.arange(scores.shape[-1]) % 2 == input_ids[:, -1:] % 2)


class ThreeOf(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, 1:] == 7).sum(1) >= 1


@pytest.mark.parametrize("kind", ["some", "few"])
def test_code_of_a_user(kind: str, steps: Counter[str]) -> None:
    """Whoever sees dead beams sees those of the host."""
    model = model_of("t5")
    inputs = zoo.text(model, seed=4)
    trie = trie_for(model, inputs, kind)
    options = dict(num_beams=5, max_new_tokens=8, prefix_allowed_tokens_fn=trie)
    compare(model, inputs, **options, logits_processor=lambda: LogitsProcessorList([Nudge()]))
    assert steps["all"] and not steps["among"] and not steps["asked"]
    steps.clear()
    compare(model, inputs, **options, stopping_criteria=lambda: StoppingCriteriaList([ThreeOf()]))
    assert_native(steps)


@pytest.mark.parametrize("name", ["bart", "gpt2"])
@pytest.mark.parametrize("kind", ["rows", "two", "function"])
def test_processors_of_a_user_with_a_trie(kind: str, name: str, steps: Counter[str]) -> None:
    """The host's own processor, for other numbers of rows or with another one: rows move from step to step."""
    model = model_of(name)
    inputs = zoo.text(model, seed=6)
    trie, several = trie_for(model, inputs, "some"), logits_process.PrefixConstrainedLogitsProcessor
    processors = {
        "rows": lambda: [several(trie, 1)],
        "two": lambda: [several(trie, 4), several(trie_for(model, inputs, "some"), 4)],
        "function": lambda: [several(trie, 4), several(lambda sentence, tokens: list(range(WORDS)), 4)],
    }[kind]
    compare(
        model,
        inputs,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=9,
        logits_processor=lambda: LogitsProcessorList(processors()),
    )
    assert steps["all"] and not steps["asked"]


class Counting(LogitsProcessor):
    """Changes the scores by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + 0.3 * ((torch.arange(scores.shape[-1]) + self.calls) % 3)


@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("after", [False, True])
def test_a_processor_before_the_trie_is_called_once_a_step(after: bool, how: str, steps: Counter[str]) -> None:
    """Also where all tokens that may follow a row are banned, so that all scores are needed."""
    model = model_of("gpt2")
    inputs = zoo.text(model, seed=6)
    prompt = prompt_of(model, inputs)
    trie = Trie([[9], *SETS["some"]], eos_token_id=END).after(prompt)
    found = []

    def processors() -> LogitsProcessorList:
        found.append(Counting())
        bans = logits_process.MinNewTokensLengthLogitsProcessor(prompt, 3, END, device="cpu")
        allowed = trie if how == "trie" else lambda sentence, tokens: trie.allowed(tokens[prompt:].tolist())
        constrained = logits_process.PrefixConstrainedLogitsProcessor(allowed, 4)
        return LogitsProcessorList([found[-1], *([constrained, bans] if after else [bans, constrained])])

    compare(model, inputs, num_beams=4, num_return_sequences=4, max_new_tokens=8, logits_processor=processors)
    assert len({one.calls for one in found}) == 1
    assert steps["all"] and steps["among"] and not steps["asked"]


class SubTrie(Trie):
    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        return [token for token in super().__call__(batch_id, input_ids) if token != 9] or [END]


def test_a_subclass_is_a_function_like_any_other(steps: Counter[str]) -> None:
    model = model_of("bart")
    inputs = zoo.text(model, seed=4)
    compare(
        model, inputs, num_beams=4, max_new_tokens=8, prefix_allowed_tokens_fn=SubTrie(SETS["few"], eos_token_id=END)
    )
    assert steps["asked"] and steps["among"] and not steps["all"]


@pytest.mark.parametrize("details", [dict(output_scores=True), dict(output_logits=True), {}])
def test_details_of_every_row(details: dict[str, Any], steps: Counter[str]) -> None:
    model = model_of("gpt2")
    inputs = zoo.text(model, seed=2)
    harness.compare(
        model,
        inputs,
        num_beams=6,
        num_return_sequences=6,
        max_new_tokens=8,
        prefix_allowed_tokens_fn=trie_for(model, inputs, "few"),
        **details,
    )
    assert not steps["asked"]


@pytest.mark.parametrize("sentences", [2, 3, 4])
def test_a_trie_for_another_batch(sentences: int) -> None:
    """Too few sentences are the user's error, with stock as with fastgen; too many are none."""
    model = model_of("bart")
    inputs = zoo.text(model, seed=2, batch=3)
    trie = Trie.per_sentence([SETS["few"]] * sentences, eos_token_id=END)
    if sentences >= 3:
        compare(model, inputs, num_beams=3, max_new_tokens=5, prefix_allowed_tokens_fn=trie)
        return
    for run in (harness.run_stock, harness.run_fastgen):
        with pytest.raises(IndexError, match="for 2 sentences, and none for sentence 2"):
            run(model, inputs, num_beams=3, max_new_tokens=5, prefix_allowed_tokens_fn=trie)


def test_tokens_that_the_model_does_not_have() -> None:
    model = model_of("bart")
    inputs = zoo.text(model, seed=2)
    trie = Trie([[5, WORDS]], eos_token_id=END)
    for run in (harness.run_stock, harness.run_fastgen):
        with pytest.raises(IndexError):
            run(model, inputs, num_beams=3, max_new_tokens=5, prefix_allowed_tokens_fn=trie)


@pytest.mark.skipif(not versions.PREFILLS, reason="its families are tried first, with numbers alone")
def test_numbers_that_are_none(steps: Counter[str]) -> None:
    """A token whose logit is NaN, and one whose is infinite, though neither is allowed."""
    for value in (float("nan"), float("inf")):
        model = copy.deepcopy(model_of("bart"))
        model.final_logits_bias = model.final_logits_bias.clone()
        model.final_logits_bias[0, 390] = value
        inputs = zoo.text(model, seed=2)
        harness.compare(
            model,
            inputs,
            num_beams=3,
            max_new_tokens=5,
            return_dict_in_generate=False,
            prefix_allowed_tokens_fn=trie_for(model, inputs, "some"),
        )
    assert steps["all"]


# ---------------------------------------------------------------------------------------------- other searches
@pytest.mark.parametrize("kind", ["many", "few", "nothing"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_search_and_samples(name: str, kind: str, steps: Counter[str]) -> None:
    model = model_of(name)
    inputs = zoo.text(model, seed=1)
    options = dict(max_new_tokens=9, prefix_allowed_tokens_fn=trie_for(model, inputs, kind))
    compare(model, inputs, **options)
    compare(model, inputs, **options, do_sample=True, top_k=0, num_return_sequences=3)
    assert not steps["asked"]


@pytest.mark.parametrize("how", ["trie", "function"])
@pytest.mark.parametrize("kind", ["few", "nothing", "one"])
@pytest.mark.parametrize("options", [dict(num_beams=3), dict(), dict(do_sample=True, num_return_sequences=2)])
def test_all_that_is_allowed_is_banned(kind: str, options: dict[str, Any], how: str, steps: Counter[str]) -> None:
    """The host then forces an allowed token, if its version does (5.24 does) and all beams of a sentence are stuck."""
    model = model_of("t5")
    inputs = zoo.text(model, seed=1)
    allowed = allowed_by(how, model, inputs, kind)
    if options.get("do_sample") and not tries._forces_one():
        pytest.skip("the host raises an error")
    compare(
        model,
        inputs,
        **options,
        max_new_tokens=9,
        suppress_tokens=None,
        bad_words_ids=[[8], [END]],
        prefix_allowed_tokens_fn=allowed,
    )
    compare(model, inputs, **options, max_new_tokens=9, min_new_tokens=6, prefix_allowed_tokens_fn=allowed)
    assert not steps["asked"]


def test_beams_that_are_drawn(steps: Counter[str]) -> None:
    model = model_of("t5")
    inputs = zoo.text(model, seed=1)
    options = dict(num_beams=3, do_sample=True, top_k=0, max_new_tokens=6)
    compare(model, inputs, **options, prefix_allowed_tokens_fn=trie_for(model, inputs, "many"))
    assert not steps["asked"]


@pytest.mark.parametrize("tier", ["fast", "compat"])
def test_tiers(tier: str) -> None:
    model = model_of("bart")
    inputs = zoo.text(model, seed=1)
    compare(
        model,
        inputs,
        tier=tier,
        num_beams=4,
        max_new_tokens=8,
        prefix_allowed_tokens_fn=trie_for(model, inputs, "some"),
    )


# ---------------------------------------------------------------------------------------------- recordings, corpora
@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_steps_are_recorded(name: str, beams: int, steps: Counter[str]) -> None:
    model = copy.deepcopy(model_of(name))
    long = [[word, *range(5, 16)] for word in range(5, 60)]
    for seed in (1, 2):
        inputs = zoo.text(model, seed=seed)
        trie = Trie(long, eos_token_id=END).after(prompt_of(model, inputs))
        options = dict(num_beams=beams, num_return_sequences=1, max_new_tokens=12)
        harness.compare(model, inputs, **options, return_dict_in_generate=False, prefix_allowed_tokens_fn=trie)
    assert statistics.counts(model).replays > 0
    assert not steps["asked"]
    before = statistics.counts(model).replays
    harness.compare(
        model,
        inputs,
        **options,
        return_dict_in_generate=False,
        prefix_allowed_tokens_fn=lambda sentence, tokens: trie.allowed(tokens[trie.prompt_length :].tolist()),
    )
    assert statistics.counts(model).replays > before  # also beside a function of the user's


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.usefixtures("rounded_weights")
@pytest.mark.parametrize("samples", [{}, dict(do_sample=True, top_k=0)])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_drafts_know_nothing_of_the_trie(name: str, samples: dict[str, Any], steps: Counter[str]) -> None:
    """What is drafted may not be allowed: then the host, which has the last word, chooses something else."""
    model = copy.deepcopy(model_of(name))
    inputs = zoo.text(model, seed=1, batch=1)
    rng = random.Random(1)
    long = [[rng.randrange(5, 60) for _ in range(30)] for _ in range(200)]
    trie = Trie(long, eos_token_id=END).after(prompt_of(model, inputs))
    with fastgen.configured(speculate=3, packing="always", replay="always"):
        compare(model, inputs, max_new_tokens=40, prefix_allowed_tokens_fn=trie, **samples)
    assert speculation._policies[model]
    assert not steps["asked"]


@pytest.fixture(params=[True, False])
def refill(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_corpus(name: str, beams: int, refill: bool, steps: Counter[str]) -> None:
    """Each source gets what it gets alone; the length of its prompt, and its place in the batch, are seen to."""
    model = model_of(name)
    rng = random.Random(3)
    sources = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 12))] for _ in range(9)]
    sets = [sequences(seed, 20) for seed in range(len(sources))]
    options: dict[str, Any] = dict(num_beams=beams, max_new_tokens=8)
    for trie in (Trie(SETS["some"], eos_token_id=END), Trie.per_sentence(sets, eos_token_id=END)):
        found = fastgen.generate(model, sources, batch_size=4, refill=refill, prefix_allowed_tokens_fn=trie, **options)
        asked = steps["asked"]
        for number, source in enumerate(sources):
            ids = torch.tensor([source])
            alone = trie.select([number]).after(prompt_of(model, {"input_ids": ids}))
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
            stock = harness.run_stock(model, inputs, **options, prefix_allowed_tokens_fn=alone)
            stock = stock if isinstance(stock, torch.Tensor) else stock.sequences
            assert found[number].tolist() == stock.tolist()
        assert asked == 0 and bool(steps["among"]) == (beams > 1)
    with pytest.raises(ValueError, match="a trie for 9 sources, and there are 2"):
        fastgen.generate(model, sources[:2], prefix_allowed_tokens_fn=trie, **options)


@pytest.mark.parametrize("kind", ["list", "tensor", "array"])
def test_an_answer_that_is_filled_again(kind: str, steps: Counter[str]) -> None:
    """The host is done with an answer before it asks for the next."""
    model = model_of("llama")
    inputs, words = zoo.text(model, seed=3, batch=3), torch.arange(12)
    kept: Any = {"list": [], "tensor": torch.zeros(12, dtype=torch.int64), "array": np.zeros(12, dtype=np.int64)}[kind]

    def allowed(sentence: int, tokens: torch.Tensor) -> Any:
        found = ((words * 31 + int(tokens[-1]) * 7 + sentence * 13) % (WORDS - 5) + 5).unique()
        if kind == "list":
            kept[:] = found.tolist()
            return kept
        kept[: len(found)] = found if kind == "tensor" else found.numpy()
        return kept[: len(found)]

    compare(model, inputs, num_beams=4, max_new_tokens=8, prefix_allowed_tokens_fn=allowed)
    assert steps["among"] if kind == "list" else steps["all"]
