"""`logprobs` of OpenAI's streams: chunks have those of the tokens in them, together those of the whole answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -c constraints.txt openai")

import torch  # noqa: E402
import zoo  # noqa: E402
from near import near  # noqa: E402
from openai_kit import Served, served  # noqa: E402
from serving_kit import TEXTS, slowly  # noqa: E402

from fastgen.optimizer.transformers.families import SHARE_BATCHES  # noqa: E402
from fastgen.serving import logprobs  # noqa: E402
from fastgen.serving.logprobs import Scored, Scorer  # noqa: E402

NEAR = 1e-4  # float32: a pass over a part adds up products in another order than one over the whole
PROMPTS = {"gpt2": ["the cat", "the dogs sat on"], "llama": ["天地玄", "日"], "bart": TEXTS[:2]}
SEARCHES: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(seed=5),
    dict(temperature=0, extra_body=dict(min_tokens=20, repetition_penalty=1.4)),
    dict(extra_body=dict(num_beams=3)),
    dict(temperature=0, best_of=4, extra_body=dict(length_penalty=-0.5, min_tokens=20)),
    dict(seed=6, extra_body=dict(num_beams=2)),  # which comes in one piece
    dict(seed=5, n=3),
    dict(temperature=0, n=2, best_of=3),
]


def joined(chunks: Sequence[Any], choices: int) -> list[tuple[str, dict[str, list[Any]]]]:
    """Text and log-probabilities of each choice, from the pieces."""
    found: list[tuple[str, dict[str, list[Any]]]] = [("", {}) for _ in range(choices)]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text, lists = found[choice.index]
        for name, values in {} if choice.logprobs is None else choice.logprobs.model_dump().items():
            lists.setdefault(name, []).extend(values)
        found[choice.index] = text + choice.text, lists
    return found


@pytest.mark.parametrize("stops", (False, True), ids=("whole", "stop"))
@pytest.mark.parametrize("search", SEARCHES, ids=json.dumps)
def test_completions(at: Served, search: dict[str, Any], stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PROMPTS[at.model.config.model_type]
    client, asked = at.client(), dict(model=at.name, prompt=prompts, max_tokens=24, logprobs=2, **search)
    if stops:
        text = client.completions.create(**asked).choices[0].text
        asked["stop"] = text[len(text) // 2 :][:2]
    whole = client.completions.create(**asked).choices
    slowly(monkeypatch)
    chunks = list(client.completions.create(stream=True, **asked))
    for choice, (text, found) in zip(whole, joined(chunks, len(whole)), strict=True):
        assert text == choice.text and near(choice.logprobs.model_dump(), abs=NEAR) == found


def test_each_chunk_has_its_own_tokens(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character is a token here."""
    slowly(monkeypatch)
    asked = dict(model=llama.name, prompt="天地", max_tokens=20, temperature=0, extra_body=dict(min_tokens=20))
    passes: list[int] = []
    real = logprobs._of
    monkeypatch.setattr(logprobs, "_of", lambda logits, *rest: (passes.append(len(logits)), real(logits, *rest))[1])
    chunks = [chunk.choices[0] for chunk in llama.client().completions.create(stream=True, logprobs=1, **asked)]
    place = 0
    for chunk in chunks:
        assert "".join(chunk.logprobs.tokens if chunk.logprobs else []) == chunk.text
        assert not chunk.logprobs or chunk.logprobs.text_offset == list(range(place, place + len(chunk.text)))
        place += len(chunk.text)
    assert len([chunk for chunk in chunks if chunk.text]) > 10 and passes
    assert sum(passes) == place  # each token is read once
    plain = list(llama.client().completions.create(stream=True, **asked))
    assert all(chunk.choices[0].logprobs is None for chunk in plain)


def test_tokens_that_are_held_back_come_with_their_text(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a text may be the beginning of a stop string, neither it nor the tokens are sent."""
    asked = dict(model=llama.name, prompt="天地", max_tokens=20, temperature=0, extra_body=dict(min_tokens=20))
    text = llama.client().completions.create(**asked).choices[0].text
    slowly(monkeypatch)
    stop = text[4:7] + "?"
    chunks = llama.client().completions.create(stream=True, logprobs=0, stop=[stop, text[15:17]], **asked)
    found = [chunk.choices[0] for chunk in chunks]
    (last,) = [one for one in found if one.finish_reason]
    assert all(len(one.text) >= len(one.logprobs.tokens) for one in found if one is not last and one.logprobs)
    assert "".join(one.text for one in found) == text[: text.find(text[15:17])]


@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_with_the_prompt(kind: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(kind, tmp_path_factory.mktemp(kind)) as at:
        asked = dict(model=at.name, prompt=PROMPTS[kind], max_tokens=9, temperature=0, echo=True, logprobs=2)
        whole = at.client().completions.create(**asked).choices
        slowly(monkeypatch)
        chunks = list(at.client().completions.create(stream=True, **asked))
        for choice, (text, found) in zip(whole, joined(chunks, 2), strict=True):
            assert text == choice.text and near(choice.logprobs.model_dump(), abs=NEAR) == found
            assert found["token_logprobs"][0] is None


@pytest.mark.parametrize("search", (dict(seed=2), dict(extra_body=dict(num_beams=3, min_tokens=20))), ids=json.dumps)
def test_conversations(llama: Served, search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "日月"}]
    asked = dict(model=llama.name, messages=messages, max_tokens=20, logprobs=True, top_logprobs=2, **search)
    (whole,) = llama.client().chat.completions.create(**asked).choices
    slowly(monkeypatch)
    chunks = [chunk.choices[0] for chunk in llama.client().chat.completions.create(stream=True, **asked)]
    content = [one.model_dump() for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert near(whole.logprobs.model_dump()["content"], abs=NEAR) == content
    own = [chunk for chunk in chunks if chunk.delta.content]
    assert len(own) > 5 and chunks[0].logprobs is None
    for chunk in own:
        special = llama.tokenizer.all_special_tokens
        tokens = [one.token for one in chunk.logprobs.content if one.token not in special]
        assert "".join(tokens) == chunk.delta.content


def test_a_pass_that_fails_ends_the_stream(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=llama.name, prompt="天", max_tokens=30, temperature=0, logprobs=1, stream=True)
    freed = llama.service.engine.counts.cancelled
    slowly(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "_of", lambda *_: [][0])
        with pytest.raises(openai.APIError, match="The model failed with IndexError"):
            list(llama.client().completions.create(**asked, extra_body=dict(min_tokens=30)))
    assert llama.service.engine.counts.cancelled == freed + 1
    assert any(chunk.choices[0].logprobs for chunk in llama.client().completions.create(**asked))


FAMILIES = [name for name in zoo.ACCELERATED if name in SHARE_BATCHES and zoo.FAMILIES[name].inputs is zoo.text]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_streams(name: str) -> None:
    """Parts of several lengths, each read once, have what one pass over all tokens has, in float64."""
    model, draw = copy.deepcopy(zoo.load(name)).double(), torch.Generator().manual_seed(2)
    words = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (28,), generator=draw).tolist()
    source, row = words[:9], words[9:]
    if model.config.is_encoder_decoder:
        row = [model.config.decoder_start_token_id, *row]
    scorer, found = Scorer(source, 3), list[Scored]()
    with torch.no_grad():
        expected, none = Scorer(source, 3)(model, row), Scorer(source, 3)(model, [])
        first = Scorer(source, 3)(model, row[:3])[0]
        if first.logprob != pytest.approx(expected[0].logprob, abs=1e-3):
            pytest.skip("the host's own pass looks ahead, as that of umt5 does in 5.17")
        for end in (1, 2, 3, 3, 7, 8, len(row) - 1):
            found += scorer(model, row[:end], grows=True)
        assert scorer._kept
        found += scorer(model, row)
        assert not scorer._kept  # a choice that has ended holds no keys and values
    assert none == [] and [one.token for one in found] == [one.token for one in expected] == words[9:]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, rel=1e-6)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], rel=1e-6)
