"""Streams of `n` choices from OpenAI's endpoints: each is that of the answer without `stream`, and ends by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -c constraints.txt openai")

from openai_kit import Served, count, wanted  # noqa: E402
from serving_kit import TEXTS, slowly  # noqa: E402

from fastgen.pipeline.transformers.growing_text import stop_in  # noqa: E402
from fastgen.serving.observed import Work  # noqa: E402
from fastgen.serving.openai_answers import TEXT, Answer, Inputs, streamed  # noqa: E402
from fastgen.serving.openai_search import search_of  # noqa: E402
from fastgen.serving.service import GENERATE  # noqa: E402

PROMPTS = {"gpt2": ["the cat", "dogs didn't"], "llama": ["天地玄", "霜"], "bart": TEXTS[:2]}


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def choices_of(stream: Any) -> list[Any]:
    """The choice of each chunk."""
    return [choice for chunk in stream for choice in chunk.choices]


def joined(choices: list[Any], number: int) -> list[str]:
    return ["".join(one.text for one in choices if one.index == index) for index in range(number)]


@pytest.mark.parametrize("seed", range(6))
def test_samples_are_those_of_generate(at: Served, seed: int) -> None:
    asked = dict(model=at.name, prompt=PROMPTS[kind(at)], max_tokens=12, n=4, seed=seed, temperature=0.9)
    found = choices_of(at.client().completions.create(stream=True, **asked))
    options = dict(do_sample=True, top_k=0, temperature=0.9, num_return_sequences=4, max_new_tokens=12)
    expected = [one for text in PROMPTS[kind(at)] for one in wanted(at, at.tokens(text), seed=seed, **options)]
    assert joined(found, 8) == [one.text for one in expected]
    ends = {one.index: one for one in found if one.finish_reason}
    whole = at.client().completions.create(**asked).choices
    assert [ends[i].finish_reason for i in range(8)] == [one.finish_reason for one in whole]
    assert [ends[i].score for i in range(8)] == pytest.approx([one.score for one in expected], abs=1e-4)


def kind(at: Served) -> str:
    return str(at.model.config.model_type)


def test_samples_grow_side_by_side_and_end_by_themselves(gpt2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends early says so while the others go on, of which nothing comes after that but their own text."""
    asked = dict(model=gpt2.name, prompt="the cat", max_tokens=40, n=4, logit_bias={"0": 3})
    lengths: list[int] = []
    for seed in range(50):  # one of which has samples of different lengths
        options = dict(do_sample=True, top_k=0, num_return_sequences=4, sequence_bias=[[[0], 3.0]])
        found = wanted(gpt2, gpt2.tokens("the cat"), seed=seed, max_new_tokens=40, **options)
        lengths = sorted(count(gpt2, one.tokens, 40)[1] for one in found)
        if lengths[0] > 3 and lengths[-1] - lengths[0] > 8:
            break
    assert lengths[-1] - lengths[0] > 8
    slowly(monkeypatch)
    stream = gpt2.client().completions.create(stream=True, seed=seed, stream_options=dict(include_usage=True), **asked)
    *chunks, last = list(stream)
    assert last.usage.completion_tokens == sum(lengths) and last.choices == []
    choices = [chunk.choices[0] for chunk in chunks]
    ends = [place for place, one in enumerate(choices) if one.finish_reason]
    assert len(ends) == 4 and len(choices) - ends[0] > 8  # the others go on
    for place in ends:
        assert all(one.index != choices[place].index for one in choices[place + 1 :])
    begins = [next(place for place, one in enumerate(choices) if one.index == index) for index in range(4)]
    assert max(begins) < ends[0]
    assert joined(choices, 4) == [one.text for one in found]
    assert [choices[place].score for place in ends] == pytest.approx(
        [found[choices[place].index].score for place in ends], abs=1e-4
    )


def test_the_best_of_beams_streams_and_the_others_come_at_the_end(
    gpt2: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    asked = dict(model=gpt2.name, prompt="the cat", max_tokens=40, temperature=0, n=3, best_of=4)
    asked |= dict(extra_body=dict(min_tokens=40, no_repeat_ngram_size=2))
    found = choices_of(gpt2.client().completions.create(stream=True, **asked))
    options = dict(max_new_tokens=40, min_new_tokens=40, num_beams=4, no_repeat_ngram_size=2, num_return_sequences=3)
    assert joined(found, 3) == [one.text for one in wanted(gpt2, gpt2.tokens("the cat"), **options)]
    indices = [one.index for one in found]
    assert indices.count(0) > 3 and indices == sorted(indices) and indices[-2:] == [1, 2]


def test_an_input_is_over_when_stop_strings_have_ended_all_samples(
    gpt2: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a stream: the rows are free, and the usage is of what was sent."""
    asked = dict(model=gpt2.name, prompt="the cat", max_tokens=40, n=3, seed=4, extra_body=dict(min_tokens=40))
    uncut = [choice.text for choice in gpt2.client().completions.create(**asked).choices]
    asked["stop"] = [text[6:9].strip("\ufffd") for text in uncut]
    slowly(monkeypatch)
    counts = gpt2.service.engine.counts
    expected = [text[: stop_in(text, asked["stop"])] for text in uncut]
    for stream in (False, True):
        before = dataclasses.replace(counts)
        usage: Any = dict(stream=True, stream_options=dict(include_usage=True)) if stream else {}
        answer = gpt2.client().completions.create(**asked, **usage)
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert joined(choices, 3) == expected
        ends = [one for one in choices if one.finish_reason]
        assert [(one.finish_reason, one.score) for one in ends] == [("stop", None)] * 3
        until(lambda before=before: counts.freed_rows == before.freed_rows + 3 and not counts.running)  # type: ignore[misc]
        assert counts.tokens - before.tokens == chunks[-1].usage.completion_tokens < 80
        assert (counts.finished, counts.cancelled) == (before.finished + 1, before.cancelled)


def test_each_choice_of_a_conversation_has_its_role(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=llama.name, messages=[{"role": "user", "content": "日月"}], max_tokens=20, n=3, seed=2)
    asked |= dict(logprobs=True, top_logprobs=1)
    whole = llama.client().chat.completions.create(**asked)
    slowly(monkeypatch)
    stream = llama.client().chat.completions.create(stream=True, stream_options=dict(include_usage=True), **asked)
    chunks = list(stream)
    assert chunks[-1].usage == whole.usage and len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [one.delta.role for one in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        tokens = [token for one in own if one.logprobs for token in one.logprobs.content]
        assert [one.token for one in tokens] == [one.token for one in choice.logprobs.content]
        logprobs = [one.logprob for one in choice.logprobs.content]
        assert [one.logprob for one in tokens] == pytest.approx(logprobs, abs=1e-4)


def test_every_choice_begins_with_the_prompt_if_that_is_asked_for(gpt2: Served) -> None:
    asked = dict(model=gpt2.name, prompt=PROMPTS["gpt2"], max_tokens=8, n=2, seed=1, echo=True)
    found = joined(choices_of(gpt2.client().completions.create(stream=True, **asked)), 4)
    assert found == [choice.text for choice in gpt2.client().completions.create(**asked).choices]
    assert [text[:2] for text in found] == ["th", "th", "do", "do"]


@pytest.mark.parametrize("search", (dict(seed=3), dict(extra_body=dict(num_beams=3))), ids=json.dumps)
def test_a_client_that_leaves_frees_all_rows(
    gpt2: Served, search: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    counts = gpt2.service.engine.counts
    before = dataclasses.replace(counts)
    asked = dict(model=gpt2.name, prompt=PROMPTS["gpt2"], max_tokens=40, n=3)
    asked |= dict(search, extra_body=dict(search.get("extra_body", {}), min_tokens=40))
    stream = gpt2.client().completions.create(stream=True, **asked)
    next(iter(stream))
    until(lambda: counts.running == 6)
    stream.close()
    until(lambda: not gpt2.service.running and not counts.running)
    assert (counts.freed_rows, counts.cancelled) == (before.freed_rows + 6, before.cancelled + 1)


def test_a_stream_that_is_closed_before_it_begins_frees_its_rows(gpt2: Served) -> None:
    """As when the client leaves in the moment in which the answer would begin."""
    body = dict(max_tokens=40, min_tokens=40, temperature=0, stream=True)
    service, before = gpt2.service, dataclasses.replace(gpt2.service.engine.counts)

    async def close() -> None:
        search = search_of(body, service.own_generation_config, service.limits)
        found = Answer(service, search, Inputs([gpt2.tokens("the cat")], GENERATE), Work(), TEXT)
        events = streamed(service, found, TEXT, gpt2.name, include_usage=False)
        await anext(events)
        await events.aclose()

    asyncio.run(close())
    assert service.running == 0
    until(lambda: service.engine.counts.cancelled == before.cancelled + 1 and not service.engine.counts.running)


def test_an_error_in_the_midst_is_of_openais_form(gpt2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    asked = dict(model=gpt2.name, prompt="a", max_tokens=40, n=3, stream=True)
    stream = gpt2.client().completions.create(extra_body=dict(timeout=0.5, min_tokens=40), **asked)
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="took longer than it may") as caught:
        seen.extend(chunk.choices[0].index for chunk in stream)
    assert (caught.value.code, caught.value.type) == ("timeout", "server_error")
    until(lambda: not gpt2.service.engine.counts.running)
