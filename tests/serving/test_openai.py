"""OpenAI's endpoints, asked by OpenAI's own client: texts, tokens and scores are those of a direct `generate`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -c constraints.txt openai")

from openai_kit import CHINESE, Served, count, listening, served, wanted  # noqa: E402
from serving_kit import TEXTS, slowly  # noqa: E402

from fastgen.serving import app as http  # noqa: E402
from fastgen.serving import generation_request  # noqa: E402

BODIES = int(os.environ.get("FASTGEN_FUZZ", "400"))  # malformed ones
PROMPTS = {
    "gpt2": ["the cat", "dogs didn't", "宇宙 on", "a"],
    "llama": ["天地玄", "日月盈昃辰", "霜"],
    "bart": TEXTS[:4],
}


def prompts(at: Served) -> list[str]:
    return PROMPTS[at.model.config.model_type]


def sampled(**options: Any) -> dict[str, Any]:
    return dict(do_sample=True, top_k=0, **options)


# What a client asks for, and what `generate` is to be asked for.
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(temperature=0), dict()),
    (dict(temperature=0, top_p=1, extra_body=dict(top_k=50)), dict()),
    (dict(temperature=0, best_of=3), dict(num_beams=3)),
    (dict(temperature=0, best_of=4, n=2), dict(num_beams=4, num_return_sequences=2)),
    (dict(extra_body=dict(num_beams=3)), dict(num_beams=3)),
    (dict(n=3, extra_body=dict(num_beams=3)), dict(num_beams=3, num_return_sequences=3)),
    (
        dict(extra_body=dict(num_beams=2, length_penalty=0.4, no_repeat_ngram_size=2)),
        dict(num_beams=2, length_penalty=0.4, no_repeat_ngram_size=2),
    ),
    (dict(extra_body=dict(num_beams=2, early_stopping=True)), dict(num_beams=2, early_stopping=True)),
    (dict(temperature=0, extra_body=dict(repetition_penalty=1.4)), dict(repetition_penalty=1.4)),
    (dict(temperature=0, extra_body=dict(min_tokens=9)), dict(min_new_tokens=9)),
    (dict(temperature=0, logit_bias={"7": 40, "9": -100}), dict(sequence_bias=[[[7], 40.0], [[9], -100.0]])),
    (dict(seed=7), sampled()),
    (dict(seed=7, temperature=0.8, top_p=0.7), sampled(temperature=0.8, top_p=0.7)),
    (dict(seed=8, temperature=1.3, extra_body=dict(top_k=5)), dict(do_sample=True, temperature=1.3, top_k=5)),
    (dict(seed=9, n=3), sampled(num_return_sequences=3)),
    (dict(seed=9, temperature=0.9, extra_body=dict(num_beams=2)), sampled(temperature=0.9, num_beams=2)),
    (dict(temperature=0, user="me", extra_body=dict(store=False, metadata={"a": "b"}, logprobs=None)), dict()),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: json.dumps(kind[0]))
def test_texts_are_those_of_generate(at: Served, kind: tuple[dict[str, Any], dict[str, Any]]) -> None:
    asked, options = kind
    answer = at.client().completions.create(model=at.name, prompt=prompts(at)[0], max_tokens=14, **asked)
    found = wanted(at, at.tokens(prompts(at)[0]), seed=asked.get("seed", 0), max_new_tokens=14, **options)
    assert [choice.text for choice in answer.choices] == [one.text for one in found]
    assert [choice.score for choice in answer.choices] == pytest.approx([one.score for one in found], abs=1e-4)
    ends = [count(at, one.tokens, 14) for one in found]
    assert [choice.finish_reason for choice in answer.choices] == [reason for reason, _ in ends]
    usage, length = answer.usage, len(at.tokens(prompts(at)[0]))
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, sum(tokens for _, tokens in ends))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (answer.object, answer.model, answer.seed) == ("text_completion", at.name, asked.get("seed"))


def test_the_best_of_several_samples_are_those_of_the_highest_probability_per_token(at: Served) -> None:
    asked = dict(prompt=prompts(at)[0], max_tokens=12, n=2, best_of=5, seed=3)
    answer = at.client().completions.create(model=at.name, **asked)
    found = wanted(at, at.tokens(prompts(at)[0]), seed=3, max_new_tokens=12, **sampled(num_return_sequences=5))
    best = sorted(found, key=lambda one: one.score / count(at, one.tokens, 12)[1], reverse=True)
    assert [choice.text for choice in answer.choices] == [one.text for one in best[:2]]


def test_several_prompts_as_texts_and_as_tokens(at: Served) -> None:
    client, asked = at.client(), dict(model=at.name, max_tokens=9, extra_body=dict(num_beams=2))
    rows = [at.tokens(text) for text in prompts(at)]
    texts = [wanted(at, row, max_new_tokens=9, num_beams=2)[0].text for row in rows]
    of_texts = client.completions.create(prompt=prompts(at), **asked)
    of_tokens = client.completions.create(prompt=rows, **asked)
    of_one = client.completions.create(prompt=rows[1], **asked)
    assert [choice.text for choice in of_texts.choices] == texts == [choice.text for choice in of_tokens.choices]
    assert [choice.index for choice in of_texts.choices] == list(range(len(texts)))
    assert of_one.choices[0].text == texts[1] and of_one.usage.prompt_tokens == len(rows[1])
    assert of_texts.usage == of_tokens.usage and of_texts.usage.prompt_tokens == sum(map(len, rows))


def _stop_of(text: str, place: float) -> str:
    """Two or three characters from the midst of a text, which is to end before them."""
    begin = int(len(text) * place)
    return next(text[i : i + 3].strip("\ufffd") for i in range(begin, len(text)) if text[i : i + 3].strip("\ufffd "))


@pytest.mark.parametrize("options", (dict(temperature=0), dict(seed=4), dict(seed=4, n=2)))
def test_stop_strings_end_a_text(at: Served, options: dict[str, Any]) -> None:
    client, asked = at.client(), dict(model=at.name, prompt=prompts(at)[0], max_tokens=30, **options)
    whole = client.completions.create(**asked)
    stop = [_stop_of(whole.choices[0].text, 0.4), "no such text"]
    answer = client.completions.create(stop=stop, **asked)
    for choice, uncut in zip(answer.choices, whole.choices, strict=True):
        text, found, _ = uncut.text.partition(stop[0])
        assert choice.text == text
        assert choice.finish_reason == ("stop" if found else uncut.finish_reason)
    assert client.completions.create(stop=stop[0], **asked).choices == answer.choices
    assert 0 < answer.usage.completion_tokens < whole.usage.completion_tokens


def test_a_stop_string_frees_the_row(gpt2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=gpt2.name, prompt=["the cat", "a"], max_tokens=40, seed=4, extra_body=dict(min_tokens=40))
    whole = [choice.text for choice in gpt2.client().completions.create(**asked).choices]
    slowly(monkeypatch)
    counts = gpt2.service.engine.counts
    before, timed = dataclasses.replace(counts), _timed(gpt2)
    stop = [_stop_of(text, 0.3) for text in whole]
    answer = gpt2.client().completions.create(stop=stop, **asked)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    _until(lambda: counts.freed_rows == before.freed_rows + 2 and not counts.running)
    assert counts.tokens - before.tokens == answer.usage.completion_tokens < 60
    assert (counts.finished, counts.cancelled) == (before.finished + 1, before.cancelled)
    assert _timed(gpt2) == [count + 2 for count in timed]


def _timed(at: Served) -> list[int]:
    """How many inputs are in each histogram."""
    lines = [list(one.lines("")) for one in at.service.engine.latencies.histograms]
    return [int(each[-1].split()[-1]) for each in lines]


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_beams_end_at_stop_strings_as_the_hosts_do(at: Served) -> None:
    row = at.tokens(prompts(at)[0])
    (plain, *_) = wanted(at, row, max_new_tokens=16, num_beams=3)
    stop = _stop_of(plain.text, 0.5)
    options = dict(max_new_tokens=16, num_beams=3, num_return_sequences=2)
    found = wanted(at, row, stop=stop, **options)
    if at.model.config.model_type == "gpt2":  # transformers' own rule fails with the other tokenizers
        assert found == wanted(at, row, stop_strings=[stop], **options)
    asked = dict(model=at.name, prompt=row, max_tokens=16, temperature=0, n=2, best_of=3, stop=stop)
    answer = at.client().completions.create(**asked)
    assert [choice.text for choice in answer.choices] == [one.text.partition(stop)[0] for one in found]
    assert [choice.score for choice in answer.choices] == pytest.approx([one.score for one in found], abs=1e-4)
    assert any(stop in one.text for one in found)


STREAMS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(seed=5),
    dict(seed=5, temperature=0.7, top_p=0.9, extra_body=dict(repetition_penalty=1.2)),
    dict(temperature=0, extra_body=dict(min_tokens=20)),
    dict(extra_body=dict(num_beams=3)),
    dict(temperature=0, best_of=4, extra_body=dict(length_penalty=-0.5, min_tokens=20)),
    dict(seed=6, extra_body=dict(num_beams=2)),
    dict(seed=5, n=3),
    dict(seed=7, n=2, temperature=1.4, extra_body=dict(min_tokens=9)),
    dict(n=2, extra_body=dict(num_beams=3)),
    dict(seed=6, n=2, extra_body=dict(num_beams=2)),
]


@pytest.mark.parametrize("options", STREAMS, ids=json.dumps)
@pytest.mark.parametrize("stops", (False, True), ids=("whole", "stop"))
def test_a_stream_is_the_answer_in_pieces(
    at: Served, options: dict[str, Any], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, asked = at.client(), dict(model=at.name, prompt=prompts(at)[:2], max_tokens=30, **options)
    if stops:
        asked["stop"] = _stop_of(client.completions.create(**asked).choices[0].text, 0.6)
    whole = client.completions.create(**asked)
    slowly(monkeypatch)  # or several pieces come at once
    texts, ends, usages = [""] * len(whole.choices), dict[int, Any](), list[Any]()
    for chunk in client.completions.create(stream=True, stream_options=dict(include_usage=True), **asked):
        usages.append(chunk.usage)
        assert chunk.object == "text_completion" and len(chunk.choices) == (chunk.usage is None)
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice
    assert texts == [choice.text for choice in whole.choices]
    assert [ends[i].finish_reason for i in range(len(ends))] == [choice.finish_reason for choice in whole.choices]
    scores = [s if s is None else pytest.approx(s, abs=1e-4) for s in (choice.score for choice in whole.choices)]
    assert [ends[i].score for i in range(len(ends))] == scores
    assert usages[-1] == whole.usage and not any(usages[:-1])


def test_beams_come_before_the_search_has_ended(gpt2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not sent by the end alone: the engine's events of what is decided reach the client."""
    slowly(monkeypatch)
    asked = dict(model=gpt2.name, prompt="the cat", max_tokens=40, temperature=0, best_of=3)
    asked |= dict(extra_body=dict(min_tokens=40, no_repeat_ngram_size=2))
    steps = gpt2.service.engine.counts.steps
    stream = gpt2.client().completions.create(stream=True, **asked)
    first, *others = stream
    assert gpt2.service.engine.counts.steps > steps
    texts = [chunk.choices[0].text for chunk in (first, *others)]
    assert len(texts) > 3 and all(texts[:-1])
    row = gpt2.tokens("the cat")
    (best, *_) = wanted(gpt2, row, max_new_tokens=40, num_beams=3, min_new_tokens=40, no_repeat_ngram_size=2)
    assert "".join(texts) == best.text


def test_texts_without_spaces_come_character_by_character(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    asked = dict(model=llama.name, prompt="天地", max_tokens=20, temperature=0, extra_body=dict(min_tokens=20))
    pieces = [chunk.choices[0].text for chunk in llama.client().completions.create(stream=True, **asked)]
    assert len(pieces) > 10 and "".join(pieces) == llama.client().completions.create(**asked).choices[0].text
    assert set("".join(pieces)) <= set("asu" + CHINESE)


def test_a_stream_says_nothing_else_when_no_usage_is_asked_for(gpt2: Served) -> None:
    asked = dict(model=gpt2.name, prompt="the", max_tokens=5, temperature=0)
    chunks = list(gpt2.client().completions.create(stream=True, **asked))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", (False, True))
def test_echo_begins_with_the_prompt(gpt2: Served, stream: bool) -> None:
    texts = PROMPTS["gpt2"][:2]
    asked = dict(model=gpt2.name, max_tokens=8, temperature=0)
    plain = [choice.text for choice in gpt2.client().completions.create(prompt=texts, **asked).choices]
    for prompt in (texts, [gpt2.tokens(text) for text in texts]):
        answer = gpt2.client().completions.create(prompt=prompt, echo=True, stream=stream, **asked)
        found = ["", ""]
        for choice in itertools.chain.from_iterable(one.choices for one in (answer if stream else [answer])):
            found[choice.index] += choice.text
        assert found == [text + more for text, more in zip(texts, plain, strict=True)]


@pytest.mark.parametrize(
    "options", (dict(), dict(n=2), dict(num_beams=3), dict(stream=True), dict(stream=True, n=2), dict(logprobs=2))
)
def test_a_text_that_ends_at_once_is_empty(at: Served, options: dict[str, Any]) -> None:
    """Of a model whose padding is its end token, nothing is left of it."""
    from fastapi.testclient import TestClient

    ends_at_once = {"logit_bias": {str(at.model.generation_config.eos_token_id): 100}, "temperature": 1, "seed": 3}
    asked = dict(ends_at_once, prompt=prompts(at)[0], max_tokens=5, **options)
    with TestClient(http.build(at.service, None)) as client:
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        if options.get("stream"):
            *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            choices = [json.loads(event)["choices"][0] for event in events]
            assert done == "[DONE]" and [one["index"] for one in choices] == list(range(options.get("n", 1)))
            assert {(one["text"], one["finish_reason"]) for one in choices} == {("", "stop")}
            return
    found = answer.json()
    assert [(one["text"], one["finish_reason"]) for one in found["choices"]] == [("", "stop")] * options.get("n", 1)
    assert found["usage"]["completion_tokens"] == options.get("n", 1)


@pytest.mark.parametrize(
    "options",
    (
        dict(extra_body=dict(repetition_penalty=1.9)),
        dict(extra_body=dict(encoder_repetition_penalty=3.0)),
        dict(extra_body=dict(no_repeat_ngram_size=1)),
        dict(extra_body=dict(encoder_no_repeat_ngram_size=1)),
        dict(best_of=2, stop="no such text", extra_body=dict(no_repeat_ngram_size=1)),
    ),
    ids=json.dumps,
)
def test_a_shorter_prompt_is_answered_as_if_it_were_alone(gpt2: Served, options: dict[str, Any]) -> None:
    """The padding, which is the end token here, is none of its tokens: it is neither penalised nor banned."""
    texts = ["the cat", "the dogs didn't see it: they were asleep"]
    asked = dict(model=gpt2.name, max_tokens=20, temperature=0, logit_bias={"0": 4}, **options)
    together = gpt2.client().completions.create(prompt=texts, **asked).choices
    alone = [gpt2.client().completions.create(prompt=text, **asked).choices[0] for text in texts]
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.score for one in together] == pytest.approx([one.score for one in alone], abs=1e-4)


@pytest.mark.parametrize("options", (dict(), dict(n=2), dict(stream=True), dict(stop="no such text")), ids=json.dumps)
def test_what_follows_the_end_token_is_not_counted(llama: Served, options: dict[str, Any]) -> None:
    """The host's beam search fills up with end tokens where padding is token 0, as this model's is."""
    from fastapi.testclient import TestClient

    asked = dict(
        prompt="天地玄", max_tokens=30, temperature=0, best_of=3, logprobs=0, min_tokens=4, logit_bias={"2": 30}
    )
    if options.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    n, before = options.get("n", 1), llama.service.engine.counts.tokens
    with TestClient(http.build(llama.service, None)) as client:
        answer = client.post("/v1/completions", json=asked | options)
    events = [answer.json()] if not options.get("stream") else []
    events += [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"] * n
    written = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
    assert len(written) == 4 * n and "</s>" not in written
    assert events[-1]["usage"]["completion_tokens"] == 5 * n
    assert llama.service.engine.counts.tokens - before == 5 * n


def test_a_bias_of_nothing_changes_nothing(gpt2: Served) -> None:
    asked = dict(model=gpt2.name, prompt="the cat", max_tokens=9, temperature=0)
    plain = gpt2.client().completions.create(**asked)
    assert gpt2.client().completions.create(logit_bias={}, **asked).choices == plain.choices


def test_without_a_length_a_text_is_as_long_as_there_is_room_for(gpt2: Served) -> None:
    asked = dict(model=gpt2.name, temperature=0, logit_bias={"0": -100})  # not the end token
    for length, new in ((70, 26), (10, 40), (95, 1)):  # of 96 positions; 40 at most
        answer = gpt2.client().completions.create(prompt=[5] * length, **asked)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (new, "length")


MESSAGES = [
    {"role": "developer", "content": "the"},
    {"role": "user", "content": [{"type": "text", "text": "cat"}, {"type": "text", "text": "sat"}]},
    {"role": "assistant", "content": "on", "refusal": None, "tool_calls": None, "name": "x"},
    {"role": "user", "content": "mat"},
]


@pytest.mark.parametrize("kind", [KINDS[i] for i in (0, 4, 5, 7, 12, 14)], ids=lambda kind: json.dumps(kind[0]))
def test_conversations_are_written_by_the_models_template(
    gpt2: Served, kind: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    asked, options = kind
    plain = [("system", "the"), ("user", "cat\nsat"), ("assistant", "on"), ("user", "mat")]
    text = gpt2.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in plain], tokenize=False, add_generation_prompt=True
    )
    assert text == "sthe<end>ucat\nsat<end>aon<end>umat<end>a"
    row = gpt2.tokenizer(text, add_special_tokens=False).input_ids
    client = gpt2.client().chat.completions
    answer = client.create(model=gpt2.name, messages=MESSAGES, max_completion_tokens=11, **asked)
    found = wanted(gpt2, row, seed=asked.get("seed", 0), max_new_tokens=11, **options)
    assert [choice.message.content for choice in answer.choices] == [one.text for one in found]
    assert [choice.score for choice in answer.choices] == pytest.approx([one.score for one in found], abs=1e-4)
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert (answer.object, answer.usage.prompt_tokens) == ("chat.completion", len(row))


def test_special_tokens_of_a_template_are_not_there_twice(llama: Served) -> None:
    answer = llama.client().chat.completions.create(
        model=llama.name, messages=[{"role": "user", "content": "天地"}], max_tokens=9, temperature=0
    )
    row = [1, *llama.tokenizer.convert_tokens_to_ids(["u", "天", "地", "</s>", "a"])]
    assert answer.usage.prompt_tokens == len(row)
    assert answer.choices[0].message.content == wanted(llama, row, max_new_tokens=9)[0].text


@pytest.mark.parametrize("options", (dict(seed=2), dict(extra_body=dict(num_beams=3, min_tokens=20))), ids=json.dumps)
def test_a_conversation_streams(llama: Served, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=llama.name, messages=[{"role": "user", "content": "日月"}], max_tokens=20, **options)
    whole = llama.client().chat.completions.create(**asked)
    slowly(monkeypatch)
    chunks = list(llama.client().chat.completions.create(stream=True, stream_options=dict(include_usage=True), **asked))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    *deltas, last = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant" and len(deltas) > 5
    assert "".join(one.delta.content for one in deltas) == whole.choices[0].message.content
    assert (last.delta.content, last.finish_reason) == (None, whole.choices[0].finish_reason)
    assert chunks[-1].usage == whole.usage


def test_models_are_listed(at: Served) -> None:
    client = at.client()
    (one,) = client.models.list().data
    assert (one.id, one.object, one.owned_by) == (at.name, "model", "fastgen")
    assert client.models.retrieve(at.name) == one
    for call in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
        with pytest.raises(openai.NotFoundError, match="has no model 'other/one'") as caught:
            call("other/one")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


BAD: list[tuple[dict[str, Any], str, str]] = [
    (dict(), "prompt is missing: the request needs it.", "prompt"),
    (dict(prompt=""), "prompt should have at least 1 character.", "prompt"),
    (dict(prompt=[]), "prompt should have at least 1 item", "prompt"),
    (dict(prompt=[[]]), "prompt[0] should have at least 1 item", "prompt[0]"),
    (dict(prompt={}), "prompt should be a valid string or a valid list.", "prompt"),
    (dict(prompt=["a"] * 9), "at most 8 items", "prompt"),
    (dict(prompt=[1, 100_000]), "prompt[1] is 100000: the model's tokens are 0 to ", "prompt[1]"),
    (dict(prompt=[[1], [3, 999]]), "prompt[1][1] is 999: the model's tokens", "prompt[1][1]"),
    (dict(prompt=["a", "the " * 200]), "prompt[1] has ", "prompt[1]"),
    (
        dict(prompt=[5] * 70, max_tokens=40),
        "prompt has 70 tokens, max_tokens is 40, and the model has room for 96 together",
        "prompt",
    ),
    (dict(prompt="a", max_tokens=0), "max_tokens should be greater than or equal to 1.", "max_tokens"),
    (dict(prompt="a", max_tokens=41), "max_tokens should be less than or equal to 40.", "max_tokens"),
    (
        dict(prompt="a", max_tokens=4, max_completion_tokens=5),
        "max_tokens and max_completion_tokens differ",
        "max_completion_tokens",
    ),
    (dict(prompt="a", temperature=0.001), "temperature should be 0, or at least 0.01.", "temperature"),
    (dict(prompt="a", temperature="x"), "temperature should be a valid number", "temperature"),
    (dict(prompt="a", n=7), "n should be less than or equal to 6.", "n"),
    (dict(prompt="a", n=2, temperature=0), "n is 2, and the search has 1 beam: ask for num_beams of at least 2", "n"),
    (dict(prompt="a", n=4, num_beams=3), "n is 4, and the search has 3 beams: ask for num_beams", "n"),
    (
        dict(prompt="a", n=4, num_beams=3, temperature=0.7),
        "n is 4, and the search has 3 beams: ask for num_beams of at least 4, or leave num_beams out.",
        "n",
    ),
    (dict(prompt="a", n=3, best_of=2), "best_of is 2, and n is 3: best_of should be at least n.", "best_of"),
    (dict(prompt="a", num_beams=2, best_of=3), "best_of is 3, and num_beams is 2: leave out one", "best_of"),
    (dict(prompt="a", best_of=3, stop="b"), "best_of with stop is for beams", "best_of"),
    (dict(prompt="a", stop=["a", ""]), "stop[1] should have at least 1 character.", "stop[1]"),
    (dict(prompt="a", stop=list("abcde")), "stop should have at most 4 items", "stop"),
    (dict(prompt="a", logprobs=21), "logprobs should be less than or equal to 20.", "logprobs"),
    (dict(prompt="a", logprobs=True), "logprobs should be ", "logprobs"),
    (dict(prompt="a", top_logprobs=1), "top_logprobs is no field of the service", "top_logprobs"),
    (dict(prompt="a", suffix="x"), "suffix is not offered: leave it out.", "suffix"),
    (dict(prompt="a", presence_penalty=0.5), "presence_penalty is not offered", "presence_penalty"),
    (dict(prompt="a", logit_bias={"x": 1}), "logit_bias.x should match pattern", "logit_bias.x"),
    (dict(prompt="a", logit_bias={"5": 101}), "logit_bias.5 should be less than or equal to 100.", "logit_bias.5"),
    (dict(prompt="a", nonsense=1), "nonsense is no field of the service: /docs lists", "nonsense"),
    (dict(prompt="a", max_new_tokens=1), "does not offer (max_tokens is the same)", "max_new_tokens"),
    (dict(prompt="a", do_sample=True), "does not offer (temperature above 0 samples)", "do_sample"),
    (dict(prompt="a", messages=[]), "messages is no field of the service", "messages"),
    (dict(prompt="a", stream_options={}), "stream_options is for streams", "stream_options"),
    (
        dict(prompt="a", stream=True, stream_options={"x": 1}),
        "stream_options.x is no field of the service",
        "stream_options.x",
    ),
    (dict(prompt="a", stream=True, best_of=2), "best_of with stream is for beams: ask for temp", "best_of"),
    (dict(prompt="a", stream=True, n=2, best_of=3), "best_of with stream is for beams: ask for temp", "best_of"),
    (dict(prompt="a", stream=True, n=2, temperature=0), "n is 2, and the search has 1 beam: ask for num_beams", "n"),
    (dict(prompt="a", typical_p=0), "typical_p should be greater than 0.", "typical_p"),
    (dict(messages=[]), "messages should have at least 1 item", "messages"),
    (dict(messages=[{"role": "user"}]), "messages[0].content is missing: the request needs it.", "messages[0].content"),
    (
        dict(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": 5}]),
        "messages[1].content should be a valid string or a valid list.",
        "messages[1].content",
    ),
    (
        dict(messages=[{"role": "king", "content": "a"}]),
        "messages[0].role should be 'system', 'developer', 'user' or 'assistant'.",
        "messages[0].role",
    ),
    (
        dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].type should be 'text'.",
        "messages[0].content[0].type",
    ),
    (
        dict(messages=[{"role": "user", "content": "a", "tool_calls": [{}]}]),
        "messages[0].tool_calls is not offered: leave it out.",
        "messages[0].tool_calls",
    ),
    (dict(messages=[{"role": "assistant", "content": "a"}]), "The chat template refuses: ", "messages"),
    (dict(messages=[{"role": "user", "content": "a"}], tools=[{}]), "tools is not offered", "tools"),
    (dict(messages=[{"role": "user", "content": "a"}], logprobs=1), "logprobs should be a valid boolean", "logprobs"),
    (
        dict(messages=[{"role": "user", "content": "a"}], top_logprobs=2),
        "top_logprobs is for logprobs: ask for that, or leave it out.",
        "top_logprobs",
    ),
    (dict(messages=[{"role": "user", "content": "a"}], echo=True), "echo is no field of the service", "echo"),
    (
        dict(messages=[{"role": "user", "content": "the " * 60}], max_tokens=40),
        "The conversation in messages has ",
        "messages",
    ),
]


@pytest.mark.parametrize("body, sentence, field", BAD, ids=lambda one: str(one)[:50])
def test_what_cannot_be_used_is_a_sentence_in_openais_form(
    gpt2: Served, body: dict[str, Any], sentence: str, field: str
) -> None:
    path = "/chat/completions" if "messages" in body and "prompt" not in body else "/completions"
    with pytest.raises(openai.BadRequestError) as caught:
        gpt2.client().post(path, body=body, cast_to=object)
    error = caught.value
    assert sentence in error.body["message"], error.body
    assert (error.param, error.type) == (field, "invalid_request_error")
    assert error.response.headers["x-should-retry"] == "false" and set(error.response.json()) == {"error"}


def test_models_without_a_template_and_with_an_encoder_say_what_they_cannot(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with served("bart", tmp_path_factory.mktemp("bart")) as at:
        with pytest.raises(openai.BadRequestError, match="has no chat template") as caught:
            at.client().chat.completions.create(model=at.name, messages=[{"role": "user", "content": "1"}])
        assert caught.value.code == "no_chat_template"
        with pytest.raises(openai.BadRequestError, match="echo is for models that go on with a prompt"):
            at.client().completions.create(model=at.name, prompt="1", echo=True)


def test_bodies_that_are_no_json_and_other_pages(gpt2: Served) -> None:
    from fastapi.testclient import TestClient

    with TestClient(http.build(gpt2.service, None)) as client:
        head = {"content-type": "application/json"}
        for sent, status, message in (
            (b"{", 400, "The body is no JSON at character 1"),
            (b"", 400, "The body is empty: send an object of JSON with the field `prompt`."),
            (b"[]", 400, "The body is no object of JSON: send an object with the field `prompt`."),
            (b'{"prompt": "' + b"a" * (2 << 20), 413, "The body has more than"),
        ):
            answer = client.post("/v1/completions", content=sent, headers=head)
            assert answer.status_code == status and answer.json()["error"]["message"].startswith(message)
        for path, status in (("/v1/embeddings", 404), ("/v1/completions", 405)):
            answer = client.get(path)
            assert answer.status_code == status and "/docs lists" in answer.json()["error"]["message"]
        assert "detail" in client.post("/v1/generate", json={}).json()  # which stays as it is


def test_who_is_refused_hears_whether_to_try_again(gpt2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=gpt2.name, prompt="a", max_tokens=3)

    def refusal(kind: type[Exception], **more: Any) -> Any:
        with pytest.raises(kind) as caught:
            gpt2.client().completions.create(**asked, **more)
        return caught.value

    for why, kind, code in (
        (generation_request.Full, openai.RateLimitError, "rate_limit_exceeded"),
        (generation_request.Stopped, openai.InternalServerError, None),
    ):
        with monkeypatch.context() as patch:

            def refuse(request: Any, why: Any = why) -> None:
                raise why

            patch.setattr(gpt2.service.engine, "submit", refuse)
            error = refusal(kind)
        headers = error.response.headers
        assert (headers["retry-after"], headers["x-should-retry"], error.code) == ("1", "true", code)
        assert error.status_code == (429 if code else 503)
    slowly(monkeypatch)
    asked |= dict(max_tokens=40, temperature=0)  # which take 40 times 30 ms, at the least
    error = refusal(openai.InternalServerError, extra_body=dict(timeout=0.2, min_tokens=40))
    assert (error.status_code, error.code, error.response.headers["x-should-retry"]) == (504, "timeout", "false")
    asked |= dict(stream=True, extra_body=dict(timeout=0.5, min_tokens=40))
    with pytest.raises(openai.APIError, match="took longer than it may"):
        list(gpt2.client().completions.create(**asked))


def test_the_key_is_the_bearer_token(gpt2: Served) -> None:
    with listening(http.build(gpt2.service, "sesame")) as url:
        at = gpt2._replace(url=url)
        with pytest.raises(openai.AuthenticationError, match="bearer token") as caught:
            at.client().models.list()
        assert caught.value.code == "invalid_api_key"
        assert at.client(api_key="sesame").models.list().data[0].id == at.name


def test_a_service_that_stops_refuses_and_a_stream_that_is_left_frees_the_row(
    gpt2: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    asked = dict(model=gpt2.name, prompt="a", max_tokens=40, temperature=0, extra_body=dict(min_tokens=40))
    freed = gpt2.service.engine.counts.freed_rows
    stream = gpt2.client().completions.create(stream=True, **asked)
    next(iter(stream))
    assert gpt2.service.running == 1
    gpt2.service.stop()
    try:
        with pytest.raises(openai.InternalServerError, match="is stopping"):
            gpt2.client().completions.create(**asked)
    finally:
        gpt2.service._is_stopping = False
    stream.close()
    _until(lambda: not gpt2.service.running and gpt2.service.engine.counts.freed_rows > freed)


def test_many_clients_of_all_kinds(at: Served) -> None:
    """Each gets what `generate` makes of its request alone, whatever shares the batch."""
    chance, jobs = random.Random(6), list[Any]()
    for number in range(32):
        asked, options = KINDS[number % len(KINDS)]
        jobs.append((chance.choice(prompts(at)), asked, options, chance.random() < 0.4))

    def ask(job: Any) -> list[str]:
        text, asked, options, streams = job
        found = at.client().completions.create(model=at.name, prompt=text, max_tokens=10, stream=streams, **asked)
        texts = [""] * options.get("num_return_sequences", 1)
        for choice in itertools.chain.from_iterable(one.choices for one in (found if streams else [found])):
            texts[choice.index] += choice.text
        return texts

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, jobs))
    for (text, asked, options, _), answer in zip(jobs, answers, strict=True):
        found = wanted(at, at.tokens(text), seed=asked.get("seed", 0), max_new_tokens=10, **options)
        assert answer == [one.text for one in found]
    assert at.service.running == 0 and at.service.engine.is_alive


def _garbled(chance: random.Random, fields: list[str], body: dict[str, Any]) -> bytes:
    """A good body with something wrong in it."""
    values: list[Any] = [None, True, -1, 0, 2**70, 1e308, "", "x", [], [[]], {}, [None], {"a": 1}, "\u0000", [1] * 50]
    for _ in range(chance.randrange(1, 4)):
        body[chance.choice([*fields, "x"])] = chance.choice(values)
    raw = bytearray(json.dumps(body).encode())
    if chance.random() < 0.3:
        place = chance.randrange(len(raw))
        raw[place : place + chance.randrange(3)] = bytes(chance.randrange(256) for _ in range(chance.randrange(3)))
    return bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
def test_malformed_bodies_are_never_the_services_fault(gpt2: Served, path: str) -> None:
    from fastapi.testclient import TestClient

    from fastgen.serving import openai_schema
    from fastgen.serving.limits import Limits

    make = openai_schema.chat if "chat" in path else openai_schema.completion
    needed: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    chance, statuses, fields = random.Random(9), set(), list(make(Limits()).model_fields)
    with TestClient(http.build(gpt2.service, None), raise_server_exceptions=False) as client:
        for _ in range(BODIES):
            body = _garbled(chance, fields, {**needed, "max_tokens": 2})
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), answer.text  # some are requests all the same
            assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert {200, 400} <= statuses and gpt2.service.engine.is_alive


def test_the_examples_on_the_page_are_answered(gpt2: Served) -> None:
    from fastapi.testclient import TestClient

    with TestClient(http.build(gpt2.service, None)) as client:
        schema = client.get("/openapi.json").json()
        for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
            example = schema["components"]["schemas"][name]["example"]
            answer = client.post(path, json={**example, "max_tokens": 9})
            assert answer.status_code == 200, answer.text
            assert {"200", "400", "401", "404", "429", "503", "504"} <= set(schema["paths"][path]["post"]["responses"])
