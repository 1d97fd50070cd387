"""`fastgen.stream`: the tokens of one call, as they are decided; the call ends with the generator."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen import report


def threads() -> int:
    return sum(thread.name == "fastgen-suspended" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "llama"])
@pytest.mark.parametrize("beams", [1, 2, 4])
def test_all_tokens_of_the_best_sequence(name: str, beams: int) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1)
    expected = harness.run_stock(model, inputs, num_beams=beams, max_new_tokens=16)[0].tolist()
    prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    assert list(fastgen.stream(model, **inputs, num_beams=beams, max_new_tokens=16)) == expected[prompt:]
    assert threads() == 0


def test_samples() -> None:
    model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2", batch=1)
    torch.manual_seed(5)
    expected = model.generate(**inputs, do_sample=True, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :].tolist()
    torch.manual_seed(5)
    assert list(fastgen.stream(model, **inputs, do_sample=True, max_new_tokens=12)) == expected


def test_the_value_is_what_generate_returns() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    options = dict(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True)
    values: list[Any] = []

    def through() -> Any:
        values.append((yield from fastgen.stream(model, **inputs, **options, max_new_tokens=10)))

    tokens = list(through())
    harness.assert_same(harness.run_stock(model, inputs, **options, max_new_tokens=10), values[0])
    assert tokens == values[0].sequences[0, 1 : 1 + len(tokens)].tolist()


def test_tokens_come_one_by_one() -> None:
    """When the first token is there, the search has not gone on to the end."""
    calls = 0

    class Counting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return scores

    processors = LogitsProcessorList([Counting()])
    options = dict(num_beams=2, min_new_tokens=30, max_new_tokens=40, logits_processor=processors)
    seen = []
    for seed in range(3):
        calls, inputs = 0, zoo.inputs_for("gpt2", seed, batch=1)
        seen.append([calls for _ in fastgen.stream(zoo.load("gpt2"), **inputs, **options)])
    assert all(each[0] < each[-1] for each in seen)
    assert max(len(set(each)) for each in seen) > 3


@pytest.mark.parametrize("beams", [1, 3])
def test_leaving_early_ends_the_call(beams: int) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    options = dict(num_beams=beams, max_new_tokens=40, min_new_tokens=30)
    report.reset()
    tokens = fastgen.stream(model, **inputs, **options)
    next(tokens)
    assert threads() == 1
    tokens.close()
    assert threads() == 0 and not report.calls(), "the call went on to the end"
    for _ in fastgen.stream(model, **inputs, **options):
        break
    gc.collect()
    assert threads() == 0
    fastgen.stream(model, **inputs, **options)  # never begun
    harness.compare(model, inputs, **options)  # the model is as it was


@pytest.mark.parametrize("replay", ["auto", "always"])
def test_others_may_generate_between_two_tokens(replay: str) -> None:
    """The call waits with nothing locked: for calls in the loop's body, and for another stream."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    options = dict(num_beams=3, max_new_tokens=16)
    expected = harness.run_stock(model, inputs, **options)[0].tolist()
    with fastgen.configured(replay=replay):
        for _ in range(3):
            found = []
            for token in fastgen.stream(model, **inputs, **options):
                found.append(token)
                assert model.generate(**inputs, **options)[0].tolist() == expected
            assert found == expected[1:]
            streams = [fastgen.stream(model, **inputs, **options) for _ in range(2)]
            assert list(zip(*streams, strict=True)) == [(token, token) for token in expected[1:]]


def test_nothing_is_kept() -> None:
    model, inputs = zoo.fresh("bart"), zoo.inputs_for("bart", batch=1)
    tokens = fastgen.stream(model, **inputs, num_beams=3, max_new_tokens=30)
    next(tokens)
    held = weakref.ref(model)
    tokens.close()
    del model, tokens
    fastgen.release()
    gc.collect()
    assert held() is None


def test_errors_are_raised_where_the_tokens_are_read() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)

    class Failing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 8:
                raise KeyError("a processor's error")
            return scores

    options = dict(num_beams=2, max_new_tokens=30, min_new_tokens=20)
    tokens = fastgen.stream(model, **inputs, **options, logits_processor=LogitsProcessorList([Failing()]))
    with pytest.raises(KeyError, match="a processor's error"):
        list(tokens)
    assert threads() == 0


def test_what_cannot_be_streamed() -> None:
    model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2", batch=2)
    for beams in (1, 3):
        with pytest.raises(
            ValueError, match="one input, one sample of it, and its beams in one group: this call has 2"
        ):
            list(fastgen.stream(model, **inputs, num_beams=beams, max_new_tokens=4))
    one = zoo.inputs_for("gpt2", batch=1)
    with pytest.raises(ValueError, match="one input, one sample of it, and its beams in one group: this call has 3"):
        list(fastgen.stream(model, **one, do_sample=True, num_return_sequences=3, max_new_tokens=4))
    with pytest.raises(ValueError, match=r"streamer: fastgen\.stream has a streamer of its own"):
        fastgen.stream(model, **one, streamer=object())
    with pytest.raises(ValueError, match="a method generate: str"):
        fastgen.stream("model", **one)
    with fastgen.disabled(), pytest.raises(ValueError, match="cannot be used with beam search"):
        list(fastgen.stream(model, **one, num_beams=3, max_new_tokens=4))


@pytest.mark.parametrize("own", [False, True])
def test_another_search_is_no_part_of_the_stream(own: bool) -> None:
    """A `generate` of the model's own, as Whisper's, may search again; assisted decoding passes several tokens on."""
    model = zoo.load("gpt2")

    class Twice(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **options: Any) -> Any:
            super().generate(*args, **options)
            return super().generate(*args, **options)

    inputs = zoo.inputs_for("gpt2", batch=1)
    if own:
        model = zoo.fresh("gpt2")
        model.__class__ = Twice
        tokens, stream = [], fastgen.stream(model, **inputs, max_new_tokens=4, min_new_tokens=4)
        with pytest.raises(ValueError, match="another search begins"):
            tokens.extend(stream)
        assert not tokens or len(tokens) == 4
    else:
        options = dict(max_new_tokens=9)
        with fastgen.disabled():
            stock = model.generate(**inputs, **options)
        stream = fastgen.stream(model, **inputs, **options, assistant_model=zoo.load("llama"))
        assert list(stream) == stock[0, inputs["input_ids"].shape[1] :].tolist()


def test_settings_autocast_and_inference_mode_are_those_of_the_caller() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    seen = []

    class Looking(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
            return scores

    processors = LogitsProcessorList([Looking()])
    options = dict(num_beams=2, max_new_tokens=6, logits_processor=processors)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        list(fastgen.stream(model, **inputs, **options))
    assert set(seen) == {(True, True)}
    with fastgen.configured(tier="stock"), pytest.raises(ValueError, match="cannot be used with beam search"):
        list(fastgen.stream(model, **inputs, num_beams=2, max_new_tokens=6))
