"""Greedy search and sampling over the tree: every family, with the host's own loop, tokens equal with the same seed."""

from __future__ import annotations

import copy
import threading
import types
from typing import Any

import harness
import pytest
import torch
import transformers
import zoo
from disguise import disguised
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import logits_process
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import report
from fastgen.optimizer.transformers.versions import CACHE

MODES: dict[str, dict[str, Any]] = {
    "greedy": dict(max_new_tokens=12),
    "sampled": dict(max_new_tokens=12, do_sample=True, num_return_sequences=3, top_k=0),
    "warped": dict(
        max_new_tokens=10, do_sample=True, num_return_sequences=2, temperature=0.8, top_k=20, top_p=0.9, typical_p=0.95
    ),
    # With min_p=0.02 a token of bart_distilled is within 1e-8 of the threshold: rounding decides.
    "ruled": dict(max_new_tokens=10, do_sample=True, min_p=0.03, no_repeat_ngram_size=2, repetition_penalty=1.2),
}
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def inputs_for(family: str) -> dict[str, Any]:
    return {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_identical(family: str, mode: str) -> None:
    options = {"num_beams": 1, **MODES[mode], **DETAILS}
    harness.compare(zoo.load(family), inputs_for(family), expected=zoo.FAMILIES[family].expected, **options)


@pytest.mark.parametrize("family", sorted({"bart", "gpt2", "llama", "t5"}.intersection(zoo.ACCELERATED)))
def test_one_prompt_for_all_samples(family: str) -> None:
    """Seen from the host: the prompt comes once per sentence, then every step has a row for each sample."""
    model, rows = zoo.load(family), []

    def count_rows(module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        rows.append((inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]).shape)

    options = dict(num_beams=1, do_sample=True, num_return_sequences=4, max_new_tokens=6, min_new_tokens=6)
    harness.compare(model, inputs_for(family), **options)
    forward = type(model).forward

    def counting(self: Any, *args: Any, **inputs: Any) -> Any:
        count_rows(self, args, inputs)
        return forward(self, *args, **inputs)

    with pytest.MonkeyPatch.context() as patch, harness.configured(replay="off"):
        patch.setattr(type(model), "forward", disguised(counting, type(model)))
        harness.run_fastgen(model, inputs_for(family), **options)
    batch = zoo.inputs_for(family)["input_ids"].shape[0]
    if transformers.__version__.startswith("4."):  # there a trial of a changed class comes before
        rows = rows[-6:]
    assert rows[0][0] == batch and {tuple(shape) for shape in rows[1:]} == {(4 * batch, 1)} and len(rows) == 6


@pytest.mark.parametrize("search", [dict(), dict(num_beams=3), dict(num_beams=1, do_sample=True, top_k=0)], ids=str)
@pytest.mark.parametrize("family", sorted({"bart", "gpt2", "llama"}.intersection(zoo.ACCELERATED)))
def test_each_sentence_has_tokens_of_its_own(family: str, search: dict[str, Any]) -> None:
    """The host tells which sentence a row is of by the number of beams and, from 5.24 on, that of samples."""

    def allowed(sentence: int, tokens: torch.Tensor) -> list[int]:
        return list(range(5 + sentence, zoo.VOCAB, 3))

    options = {**search, "num_return_sequences": 3 if len(search) else 1, "prefix_allowed_tokens_fn": allowed}
    harness.compare(zoo.load(family), inputs_for(family), max_new_tokens=8, **options, **DETAILS)


def test_more_tokens_than_the_first_buffers() -> None:
    harness.compare(zoo.load("llama"), inputs_for("llama"), num_beams=1, max_new_tokens=90, min_new_tokens=90)


@pytest.mark.parametrize("family", sorted({"bart", "gpt2"}.intersection(zoo.ACCELERATED)))
@pytest.mark.parametrize("sampled", [False, True])
def test_bans_are_ours(family: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that only ban tokens do so in our way, and leave the logits that the host returns alone."""
    options: dict[str, Any] = dict(num_beams=1, do_sample=sampled, temperature=0.7 if sampled else None)
    options |= dict(max_new_tokens=12, min_new_tokens=9, no_repeat_ngram_size=2, suppress_tokens=[3, 7], top_k=0)
    stock = harness.run_stock(zoo.load(family), inputs_for(family), **options, **DETAILS)
    assert all(logits.isfinite().all() for logits in stock.logits) and stock.scores[-1].isinf().any()
    # Code in the host's module: what a user puts there is called.
    uncalled = types.FunctionType((lambda *args: 1 / 0).__code__, vars(logits_process))
    for name in ("MinNewTokensLength", "NoRepeatNGram", "SuppressTokens"):
        monkeypatch.setattr(getattr(logits_process, f"{name}LogitsProcessor"), "__call__", uncalled)
    output, _ = harness.run_fastgen(zoo.load(family), inputs_for(family), **options, **DETAILS)
    assert torch.equal(output.sequences, stock.sequences)
    for ours, theirs in ((output.scores, stock.scores), (output.logits, stock.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-4)


def test_cache_is_the_hosts() -> None:
    model, options = zoo.load("gpt2"), dict(num_beams=1, max_new_tokens=5, num_return_sequences=2, do_sample=True)
    stock = harness.run_stock(model, inputs_for("gpt2"), **options, **DETAILS)
    output, _ = harness.run_fastgen(model, inputs_for("gpt2"), **options, **DETAILS)
    for a, b in zip(getattr(stock, CACHE), getattr(output, CACHE), strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a[1], b[1], rtol=1e-4, atol=1e-4)


class Words(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers() -> None:
    model, inputs = zoo.load("gpt2"), {name: value[:1] for name, value in inputs_for("gpt2").items()}
    stock, ours = Words(), Words()
    with fastgen.disabled():
        model.generate(**inputs, streamer=stock, num_beams=1, max_new_tokens=8)
    report.reset()
    model.generate(**inputs, streamer=ours, num_beams=1, max_new_tokens=8)
    assert [call.tier for call in report.calls()] == ["compat"]
    assert ours.got == stock.got and len(ours.got) > 3 and ours.ended == 1


def test_a_streamer_read_by_another_thread() -> None:
    class Numbers:
        def decode(self, tokens: Any, **options: Any) -> str:
            return " ".join(map(str, tokens)) + " "

    model, inputs = zoo.load("gpt2"), {name: value[:1] for name, value in inputs_for("gpt2").items()}
    texts = []
    for off in (True, False):
        streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
        with fastgen.disabled() if off else harness.configured(strict=True):
            thread = threading.Thread(
                target=model.generate, kwargs={**inputs, "streamer": streamer, "num_beams": 1, "max_new_tokens": 8}
            )
            thread.start()
            texts.append("".join(streamer))
            thread.join()
    assert texts[0] == texts[1] and texts[0].split()


@pytest.mark.parametrize("end", ["at once", "never"])
def test_ends(end: str) -> None:
    model, inputs = zoo.load("bart"), inputs_for("bart")
    first = int(harness.run_stock(model, inputs, num_beams=1, max_new_tokens=1)[0, -1])
    eos = list(range(model.config.vocab_size)) if end == "at once" else None
    options = dict(num_beams=1, max_new_tokens=7, eos_token_id=eos or first, forced_eos_token_id=None)
    options |= {} if eos else {"min_new_tokens": 7}
    output = harness.compare(model, inputs, **options)
    assert output.sequences.shape[1] == (2 if eos else 8)


def test_rows_that_do_not_share_a_prompt_stay_with_the_host() -> None:
    """`_sample` called without `generate`, which expands the inputs."""
    model, inputs = zoo.load("gpt2"), inputs_for("gpt2")
    expected = harness.run_stock(model, {**inputs, "num_return_sequences": 1}, num_beams=1, max_new_tokens=5)

    def direct(model: Any, arguments: dict[str, Any]) -> Any:
        def decode(model: Any, input_ids: Any, generation_config: Any, **kwargs: Any) -> Any:
            generation_config.num_return_sequences = len(input_ids)
            return model._sample(input_ids, generation_config=generation_config, **kwargs)

        return model.generate(**arguments, custom_generate=decode)

    output, calls = harness.run_fastgen(model, inputs, direct, strict=False, num_beams=1, max_new_tokens=5)
    assert torch.equal(output, expected)
    assert [call.reason for call in calls] == ["rows that should share a prompt differ"]


def test_assisted_decoding_is_left_alone() -> None:
    model, inputs = zoo.load("gpt2"), {name: value[:1] for name, value in inputs_for("gpt2").items()}
    options = dict(num_beams=1, max_new_tokens=8, prompt_lookup_num_tokens=3)
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, strict=False, **options)
    assert torch.equal(stock, output)


def test_an_assistant_model_is_no_call_of_its_own() -> None:
    """Its drafts are a part of the host's assisted decoding: no rows, and no error in strict mode."""
    model, inputs = zoo.load("gpt2"), {name: value[:1] for name, value in inputs_for("gpt2").items()}
    options = dict(num_beams=1, max_new_tokens=8, assistant_model=copy.deepcopy(model))
    stock = harness.run_stock(model, inputs, **options)
    output, calls = harness.run_fastgen(model, inputs, strict=True, **options)
    assert torch.equal(stock, output) and not calls


def test_an_own_stopping_criterion() -> None:
    class Enough:
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return (input_ids[:, -4:] % 2 == 0).all(1)

    model, inputs = zoo.load("bart"), inputs_for("bart")
    options = dict(num_beams=1, max_new_tokens=12, do_sample=True, num_return_sequences=2)
    harness.compare(model, inputs, stopping_criteria=lambda: StoppingCriteriaList([Enough()]), **options)


@pytest.mark.parametrize("mode", [dict(), dict(do_sample=True, num_return_sequences=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", sorted({"bart", "llama", "m2m_100"}.intersection(zoo.ACCELERATED)))
def test_a_criterion_that_allows_more_than_the_configuration(family: str, mode: dict[str, Any]) -> None:
    """The host's loop asks the criteria alone, and one of the user's replaces its own."""
    model, inputs = zoo.load(family), inputs_for(family)
    longest = 30 + (1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1])
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=longest)])
    options = dict(num_beams=1, max_new_tokens=8, eos_token_id=zoo.VOCAB, stopping_criteria=criteria, **mode)
    stock = harness.compare(model, inputs, **options)
    assert stock.sequences.shape[1] == longest


@pytest.mark.parametrize("beams", [1, 3])
def test_a_criterion_that_allows_less_than_the_configuration(beams: int) -> None:
    model, inputs = zoo.load("llama"), inputs_for("llama")
    longest = 8 + inputs["input_ids"].shape[1]
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=longest)])
    options = dict(num_beams=beams, max_new_tokens=20, eos_token_id=zoo.VOCAB, stopping_criteria=criteria)
    stock = harness.compare(model, inputs, **options)
    assert stock.sequences.shape[1] == longest


@pytest.mark.parametrize("family", sorted({"bart", "llama", "m2m_100"}.intersection(zoo.ACCELERATED)))
def test_a_length_without_end(family: str) -> None:
    """Such as `tokenizer.model_max_length` of a tokenizer that knows none: nothing is allocated for it."""
    model, inputs = zoo.load(family), inputs_for(family)
    longest = 30 + (1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1])
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=longest)])
    options = dict(num_beams=1, max_length=10**30, eos_token_id=zoo.VOCAB, stopping_criteria=criteria)
    harness.compare(model, inputs, **options)
    assert all(len(module.weights) < 200 for module in model.modules() if hasattr(module, "weights"))


@pytest.mark.parametrize("samples", [32, 40])
def test_many_samples_without_end(samples: int) -> None:
    """With 32 rows steps are replayed, and with more they are not."""
    inputs = {name: value[:1] for name, value in inputs_for("llama").items()}
    longest = 40 + inputs["input_ids"].shape[1]
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=longest)])
    options = dict(do_sample=True, num_return_sequences=samples, max_length=10**30, eos_token_id=zoo.VOCAB)
    harness.compare(zoo.load("llama"), inputs, stopping_criteria=criteria, **options)


def test_without_a_criterion_of_length_the_host_decodes() -> None:
    """As whoever calls its loop directly may do."""

    class Enough:
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 30)

    def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        sample = model._sample

        def sampled(input_ids: torch.Tensor, *, stopping_criteria: Any, **others: Any) -> Any:
            return sample(input_ids, stopping_criteria=StoppingCriteriaList([Enough()]), **others)

        options = dict(options, custom_generate=lambda model, *args, **others: sampled(*args, **others))
        return zoo.generate(model, inputs, **options)

    options = dict(num_beams=1, max_new_tokens=4)
    stock = harness.compare(zoo.load("llama"), inputs_for("llama"), expected="fallback", generate=generate, **options)
    assert stock.sequences.shape[1] == 30


def test_trying_a_model_out_draws_no_random_numbers() -> None:
    """An unknown class is tried before its first call, and some models draw numbers in each forward pass."""

    class Drawing(type(zoo.load("gpt2"))):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch.rand(1)
            return super().forward(*args, **kwargs)

    model = copy.deepcopy(zoo.load("gpt2"))
    model.__class__ = Drawing
    with harness.configured(foreign_code="trial"):
        harness.compare(
            model, inputs_for("gpt2"), num_beams=1, max_new_tokens=8, do_sample=True, num_return_sequences=3
        )


class _Raising(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 7] += 3.0
        return scores


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("options", [dict(min_new_tokens=2), dict(no_repeat_ngram_size=9), dict(suppress_tokens=[])])
def test_logits_that_a_processor_writes_to(options: dict[str, Any], sampled: bool) -> None:
    """Whether the host's processors before it have copied the logits, the output tells."""
    options = {**options, **DETAILS, "max_new_tokens": 6, "do_sample": sampled, "num_beams": 1}
    processors = LogitsProcessorList([_Raising()])
    stock = harness.run_stock(zoo.load("llama"), inputs_for("llama"), **options, logits_processor=processors)
    found, _ = harness.run_fastgen(zoo.load("llama"), inputs_for("llama"), **options, logits_processor=processors)
    assert torch.equal(stock.sequences, found.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(stock.logits), rtol=1e-4, atol=1e-4)
