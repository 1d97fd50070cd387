"""`verify=N`: of the user's own calls every N-th is decoded by stock too, and a difference ends acceleration."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from disguise import disguised
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen import report
from fastgen.optimizer import verification
from fastgen.optimizer.transformers import dispatch, judge
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.verification import DIFFERENT, NEAR_TIE, SAME, UNVERIFIED

SEARCHES: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=3, max_new_tokens=10),
    "greedy": dict(num_beams=1, max_new_tokens=10),
    "samples": dict(num_beams=1, do_sample=True, num_return_sequences=3, max_new_tokens=10),
    "sampled_beams": dict(num_beams=3, do_sample=True, max_new_tokens=10),
}


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    verification.reset()
    yield
    verification.reset()


def generate(model: Any, family: str = "bart", **options: Any) -> Any:
    torch.manual_seed(7)
    return zoo.generate(model, {**zoo.inputs_for(family), **options})


def stock(model: Any, family: str = "bart", **options: Any) -> Any:
    with fastgen.disabled():
        return generate(model, family, **options)


def broken(monkeypatch: pytest.MonkeyPatch, by: float = 3.0) -> None:
    """Steps over the tree favour token 9."""
    favour = torch.zeros(zoo.load("bart").config.vocab_size)
    favour[9] = by
    shifted(monkeypatch, favour)


def shifted(monkeypatch: pytest.MonkeyPatch, by: torch.Tensor) -> None:
    """Logits of steps over the tree are others by `by`."""
    run = TreeDecoder.run

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = run(self, *args, **kwargs)
        outputs.logits = outputs.logits + by.to(outputs.logits)
        return outputs

    monkeypatch.setattr(TreeDecoder, "run", wrong)


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_equal(family: str, search: str, details: bool) -> None:
    """One answer, one record, and the random stream where it would be."""
    model = copy.deepcopy(zoo.load(family))
    options = dict(SEARCHES[search], return_dict_in_generate=details, output_scores=details)
    expected = stock(model, family, **options)
    stream = torch.get_rng_state()
    with fastgen.configured(verify=1, strict=True):
        found = generate(model, family, **options)
    harness.assert_same(expected, found)
    assert torch.equal(torch.get_rng_state(), stream)
    assert [call.tier in harness.TIERS for call in report.calls()] == [True]
    assert verification.counts() == {SAME: 1}
    assert "verified: 1 call compared with the host: 1 the same, 0 near-ties, 0 different" in str(fastgen.status())


def test_every_third_of_each_model() -> None:
    models = [copy.deepcopy(zoo.load("bart")) for _ in range(2)]
    with fastgen.configured(verify=3):
        for number in range(7):
            generate(models[0], **SEARCHES["beams"])
            if number < 2:
                generate(models[1], **SEARCHES["greedy"])
    assert verification.counts() == {SAME: 2}


def test_off_by_default() -> None:
    generate(copy.deepcopy(zoo.load("bart")), **SEARCHES["beams"])
    assert verification.counts() == {} and "verified" not in str(fastgen.status())


@pytest.mark.parametrize("search", SEARCHES)
def test_a_difference(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's answer, a warning that says how to see it again without any text, and stock from then on."""
    model, other = copy.deepcopy(zoo.load("bart")), copy.deepcopy(zoo.load("bart"))
    options = SEARCHES[search]
    for each in (model, other):
        generate(each, **options)  # where a trial comes first, it must not find what is broken
    broken(monkeypatch)
    expected = stock(model, **options)
    stream = torch.get_rng_state()
    assert not torch.equal(generate(model, **options), expected)  # or nothing is broken
    with fastgen.configured(verify=1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(generate(model, **options), expected)
        assert torch.equal(torch.get_rng_state(), stream)
        text = str(next(each.message for each in caught if "no longer accelerated" in str(each.message)))
        assert torch.equal(generate(model, **options), expected)
    assert "BartForConditionalGeneration" in text and "max_length" in text and "transformers: " in text
    assert not any(str(row.tolist())[1:-1] in text for row in expected)
    last = report.calls()[-1]
    assert last.tier == "stock" and "verified" in str(last.reason)
    assert verification.counts() == {DIFFERENT: 1}
    with fastgen.configured(strict=True), pytest.raises(fastgen.FallbackError, match="verified"):
        generate(model, **options)
    generate(other, **options)
    assert report.calls()[-1].tier != "stock"


def test_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = (
        copy.deepcopy(zoo.load("bart")),
        dict(return_dict_in_generate=True, output_scores=True, num_beams=3),
    )
    expected = stock(model, max_new_tokens=3, **options)
    generate(model, max_new_tokens=9, **options)  # where a trial comes first, it must not find what is broken
    broken(monkeypatch, 0.01)
    with fastgen.configured(verify=1), pytest.warns(RuntimeWarning, match="no longer accelerated"):
        found = generate(model, max_new_tokens=3, **options)
    assert torch.equal(found.scores[-1], expected.scores[-1])


@pytest.mark.parametrize("beams", [1, 2])
def test_a_near_tie_of_stocks(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens are as good; ours takes the other one, and goes on."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=32, pad_token_id=0, eos_token_id=39)
    model, ids = GPT2LMHeadModel(config).eval(), torch.tensor([[3, 4, 5]])
    options = dict(num_beams=beams, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    with fastgen.disabled(), torch.no_grad():
        best = int(model.generate(ids, **options)[0, 4])  # of the first step over the tree
        rows = model.transformer.wte.weight
        rows[8 if best != 8 else 7] = rows[best]
    favour = torch.zeros(40)
    shifted(monkeypatch, favour)
    for token in (7, 8, best):  # one of them is not what stock takes
        favour.zero_()[token] = 4e-6
        with fastgen.configured(verify=1):
            model.generate(ids, **options)
    counts = verification.counts()
    assert counts.get(NEAR_TIE, 0) > 0 and DIFFERENT not in counts


class _Counting(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


def test_code_of_the_users_runs_once() -> None:
    model, theirs, mine = copy.deepcopy(zoo.load("bart")), _Counting(), _Counting()
    expected = stock(model, logits_processor=LogitsProcessorList([theirs]), **SEARCHES["beams"])
    with fastgen.configured(verify=1):
        found = generate(model, logits_processor=LogitsProcessorList([mine]), **SEARCHES["beams"])
    assert torch.equal(expected, found) and mine.calls == theirs.calls > 0
    assert verification.counts() == {UNVERIFIED: 1}
    assert "not compared: 1 with code of yours between the steps" in " ".join(str(fastgen.status()).split())


class _Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_is_told_once() -> None:
    """The host's own, too, which print."""
    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama", batch=1)
    theirs, mine = _Streamer(), _Streamer()
    mine.__class__.__module__ = "transformers.generation.streamers"
    with fastgen.disabled():
        model.generate(**inputs, max_new_tokens=6, streamer=theirs)
    with fastgen.configured(verify=1, strict=True):
        model.generate(**inputs, max_new_tokens=6, streamer=mine)
    assert mine.seen == theirs.seen and verification.counts() == {UNVERIFIED: 1}


def test_a_time_limit() -> None:
    with fastgen.configured(verify=1):
        generate(copy.deepcopy(zoo.load("bart")), **SEARCHES["beams"], max_time=60.0)
    assert verification.counts() == {UNVERIFIED: 1}


class _Alternating(LogitsProcessor):
    """A state that a second call would begin with."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls % 3 else scores.roll(1, -1)


_Alternating.__module__ = "transformers.generation.logits_process"
_Alternating.__call__ = disguised(_Alternating.__call__, _Alternating)  # type: ignore[method-assign]


def test_a_processor_of_the_hosts_with_a_state() -> None:
    model, theirs, mine = copy.deepcopy(zoo.load("bart")), _Alternating(), _Alternating()
    expected = stock(model, logits_processor=LogitsProcessorList([theirs]), **SEARCHES["beams"])
    with fastgen.configured(verify=1):
        found = generate(model, logits_processor=LogitsProcessorList([mine]), **SEARCHES["beams"])
    assert torch.equal(expected, found) and mine.calls == theirs.calls and theirs.calls % 3
    assert verification.counts() == {SAME: 1}


def test_what_ran_stock_is_not_decoded_twice() -> None:
    model, calls = copy.deepcopy(zoo.load("bart")), []
    model.model.decoder.register_forward_hook(lambda *_: calls.append(1))
    stock(model, **SEARCHES["beams"])
    count = len(calls)
    with fastgen.configured(verify=1):
        generate(model, **SEARCHES["beams"])
    assert len(calls) == 2 * count and verification.counts() == {}


def test_encoder_outputs_and_positional_arguments() -> None:
    """The host writes to the encoder's output that it is given, once."""
    model, inputs = copy.deepcopy(zoo.load("bart")), zoo.inputs_for("bart")
    states = model.get_encoder()(**inputs).last_hidden_state.detach()

    def call() -> Any:
        outputs = BaseModelOutput(last_hidden_state=states)
        mask = inputs["attention_mask"]
        return model.generate(encoder_outputs=outputs, attention_mask=mask, num_beams=3, max_new_tokens=8)

    with fastgen.disabled():
        expected = call()
        positional = model.generate(
            inputs["input_ids"], None, LogitsProcessorList(), StoppingCriteriaList(), num_beams=3
        )
    with fastgen.configured(verify=1, strict=True):
        found = call()
        again = model.generate(inputs["input_ids"], None, LogitsProcessorList(), StoppingCriteriaList(), num_beams=3)
    assert torch.equal(expected, found) and torch.equal(positional, again)
    assert verification.counts() == {SAME: 2}


@pytest.mark.parametrize("search", ["beams", "greedy"])
def test_half_precision(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the tokens are compared but, given stock's scores, the logits."""
    model = copy.deepcopy(zoo.load("bart")).to(torch.bfloat16)
    with fastgen.configured(verify=1, strict=True):
        generate(model, **SEARCHES[search])
    counts = verification.counts()
    assert counts.get(SAME, 0) + counts.get(NEAR_TIE, 0) == 1 and DIFFERENT not in counts
    broken(monkeypatch)
    with fastgen.configured(verify=1), pytest.warns(RuntimeWarning, match="no longer accelerated"):
        generate(model, **SEARCHES[search])


def test_out_of_memory_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    expected = stock(model, **SEARCHES["samples"])
    stream = torch.get_rng_state()

    def exhausted(*_: Any) -> Any:
        torch.rand(3)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(dispatch, "_run_stock", exhausted)
    with fastgen.configured(verify=1):
        found = generate(model, **SEARCHES["samples"])
    assert torch.equal(expected, found) and torch.equal(torch.get_rng_state(), stream)
    assert verification.counts() == {UNVERIFIED: 1}


def test_an_error_of_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("bart"))

    def refusing(*_: Any) -> Any:
        raise ZeroDivisionError("stock's")

    monkeypatch.setattr(dispatch, "_run_stock", refusing)
    with (
        fastgen.configured(verify=1),
        pytest.warns(RuntimeWarning, match="it raises ZeroDivisionError"),
        pytest.raises(ZeroDivisionError, match="stock's"),
    ):
        generate(model, **SEARCHES["beams"])
    assert "ZeroDivisionError" in str(verification.reason_against(model))


def test_a_closer_look_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's answer is there, and is returned."""
    model = copy.deepcopy(zoo.load("bart"))
    expected = stock(model, **SEARCHES["beams"])
    generate(model, **SEARCHES["beams"])
    broken(monkeypatch)
    monkeypatch.setattr(judge.Gaps, "recorded", None)
    with fastgen.configured(verify=1), pytest.warns(RuntimeWarning, match="a closer look failed"):
        assert torch.equal(generate(model, **SEARCHES["beams"]), expected)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_VERIFY", "5")
    assert fastgen.config.from_environment().verify == 5
    for text, what in (("x", "whole number"), ("-1", "0 or more")):
        monkeypatch.setenv("FASTGEN_VERIFY", text)
        with pytest.raises(ValueError, match=f"FASTGEN_VERIFY must be .*{what}"):
            fastgen.config.from_environment()
    with pytest.raises(TypeError, match="verify must be a whole number, not True"):
        fastgen.configure(verify=True)
