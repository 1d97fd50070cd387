"""A batch that calls enter and leave: greedy search, sampling and searches, each sentence as if it were alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import families
from fastgen.optimizer.transformers.generate import continuous_batch, shareable, suspended_call
from fastgen.pipeline.transformers.hypotheses import hypotheses_of

FAMILIES = sorted(set(zoo.ACCELERATED) & families.SHARE_BATCHES)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=3),
    "sampled": dict(do_sample=True, top_k=30),
    "samples": dict(do_sample=True, num_return_sequences=3, temperature=1.3),
    "searched": dict(num_beams=3, num_return_sequences=2),
}
# Batch, length and new tokens of each call, and the steps until the next one. Calls of one row are a case of their own.
CALLS = ((2, 9, 12, 2), (1, 5, 7, 0), (3, 6, 10, 3), (1, 4, 1, 1), (1, 8, 12, 4), (2, 3, 5, 0))


def calls_of(family: str, **options: Any) -> list[dict[str, Any]]:
    return [
        {**zoo.inputs_for(family, seed=seed, batch=batch, length=length), "max_new_tokens": new, **options}
        for seed, (batch, length, new, _) in enumerate(CALLS)
    ]


def alone(model: Any, call: Mapping[str, Any], sentence: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and scores that stock gives one sentence of a call."""
    own = {
        name: value[sentence : sentence + 1] if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    torch.manual_seed(seed)
    with fastgen.disabled():
        output = model.generate(**own, return_dict_in_generate=True, output_scores=True)
    config = copy.copy(model.generation_config)
    config.num_return_sequences = call.get("num_return_sequences", 1)
    (found,) = hypotheses_of(model, config, output, own["input_ids"].shape[1])
    return output.sequences, torch.tensor(found.scores)


class Watched:
    """Admits calls to a batch at their times, and keeps what is found of each sentence."""

    def __init__(self, model: Any, calls: list[dict[str, Any]], rows: int = 64) -> None:
        self.running, self.calls = continuous_batch.ContinuousBatch(model, rows), calls
        self.found: dict[tuple[int, int], suspended_call.Found] = {}
        self.model = model

    def run(self) -> None:
        with harness.configured(strict=True, history=64), torch.no_grad():
            for number, call in enumerate(self.calls):
                batch = CALLS[number][0]
                seeds = [100 * number + sentence for sentence in range(batch)]
                self.take(self.running.admit(number, harness.request(call, {}), tokens=True, seeds=seeds))
                for _ in range(CALLS[number][3]):
                    self.step()
            while self.running.calls:
                self.step()
            self.running.close()

    def step(self) -> None:
        calls = self.running.calls
        ended = self.running.step()
        assert all(call.ended for call in ended)
        for call in calls:
            self.take(call)

    def take(self, call: suspended_call.Call) -> None:
        for one in call.found:
            assert (call.number, one.sentence) not in self.found, "twice"
            self.found[call.number, one.sentence] = one
        call.found.clear()


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_sentence_gets_what_it_gets_alone(family: str, options: str) -> None:
    model = zoo.load(family)
    calls = calls_of(family, **OPTIONS[options])
    if why := shareable.unrefillable(model, calls[0], tokens=True):
        assert "random numbers" in why and "sample" in options
        pytest.skip(why)
    watched = Watched(model, calls)
    report.reset()
    watched.run()
    assert len(watched.found) == sum(batch for batch, *_ in CALLS)
    for (number, sentence), one in watched.found.items():
        tokens, scores = alone(model, calls[number], sentence, 100 * number + sentence)
        assert torch.equal(one.tokens[:, : tokens.shape[1]], tokens), (number, sentence)
        assert (one.tokens[:, tokens.shape[1] :] == one.tokens[:, -1:]).all()  # no more than what fills up
        torch.testing.assert_close(one.scores, scores, atol=1e-4, rtol=0)
    (call,) = report.calls()[-1:]
    assert call.tier == "fast" and 8 <= call.batch <= 9  # without what ended with its prompt


@pytest.mark.parametrize("options", ("greedy", "sampled", "searched"))
def test_sentences_that_are_given_up_leave_at_once(options: str) -> None:
    model = zoo.load("bart")
    calls = calls_of("bart", **OPTIONS[options], min_new_tokens=10)[:3]
    for call in calls:
        call["max_new_tokens"] = 12
    watched = Watched(model, calls)
    running = watched.running
    with harness.configured(strict=True), torch.no_grad():
        first, second, third = (
            running.admit(number, harness.request(call, {}), tokens=True, seeds=[5, 6, 7][: CALLS[number][0]])
            for number, call in enumerate(calls)
        )
        running.step()
        first.abandon(0)
        second.abandon(0)  # all of the call
        running.step()
        assert (first.sentences, second.ended) == (1, True)
        while running.calls:
            watched.step()
        for call in (first, second, third):
            watched.take(call)
        running.close()
    assert sorted(watched.found) == [(0, 1), (2, 0), (2, 1), (2, 2)]
    for (number, sentence), one in watched.found.items():
        tokens, _ = alone(model, calls[number], sentence, 5 + sentence)
        assert torch.equal(one.tokens[:, : tokens.shape[1]], tokens)


def test_what_streams_is_what_is_found() -> None:
    model = zoo.load("marian")
    call = calls_of("marian")[0]
    running = continuous_batch.ContinuousBatch(model, 8)
    with harness.configured(strict=True), torch.no_grad():
        admitted = running.admit(0, harness.request(call, {}), tokens=True)
        seen: dict[int, list[int]] = {}
        while running.calls:
            for sentence, tokens in admitted.running().items():
                grown = tokens[0].tolist()
                assert grown[: len(seen.get(sentence, []))] == seen.get(sentence, [])
                seen[sentence] = grown
            running.step()
        running.close()
    assert sorted(seen) == [0, 1]
    for one in admitted.found:
        assert one.tokens[0].tolist()[: len(seen[one.sentence])] == seen[one.sentence]
