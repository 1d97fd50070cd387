"""`logprobs` of OpenAI's endpoints: those of a direct forward pass of the model over what it has generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -c constraints.txt openai")

import torch  # noqa: E402
from openai_kit import Served, wanted  # noqa: E402
from serving_kit import TEXTS  # noqa: E402

from fastgen.serving import logprobs  # noqa: E402

PROMPTS = {"gpt2": "the cat", "llama": "天地玄", "bart": TEXTS[0]}


def prompt(at: Served) -> str:
    return PROMPTS[at.model.config.model_type]


def direct(at: Served, source: list[int], new: list[int], whole: bool = False) -> torch.Tensor:
    """Log-probabilities `[tokens, vocabulary]` at the place of each new token, by one call of the model."""
    with torch.no_grad():
        if at.is_seq2seq:
            row = [at.model.config.decoder_start_token_id, *new]
            ids, decoder = (torch.tensor([each], device="cpu") for each in (source, row))
            return at.model(input_ids=ids, decoder_input_ids=decoder).logits[0, :-1].log_softmax(-1)
        logits = at.model(torch.tensor([[*source, *new]], device="cpu")).logits[0]
        return logits[0 if whole else len(source) - 1 : -1].log_softmax(-1)


def without_end(at: Served, tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] == at.model.generation_config.eos_token_id else tokens


def own(found: torch.Tensor, tokens: list[int]) -> list[float]:
    return [float(row[token]) for row, token in zip(found, tokens, strict=True)]


KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(temperature=0), dict()),
    (dict(temperature=0, best_of=4, n=2), dict(num_beams=4, num_return_sequences=2)),
    (dict(extra_body=dict(num_beams=3, length_penalty=0.4)), dict(num_beams=3, length_penalty=0.4)),
    (dict(temperature=0, extra_body=dict(repetition_penalty=1.4)), dict(repetition_penalty=1.4)),
    (dict(seed=7), dict(do_sample=True, top_k=0)),
    (dict(seed=9, n=3, temperature=0.7), dict(do_sample=True, top_k=0, num_return_sequences=3, temperature=0.7)),
]


@pytest.mark.parametrize("top", (0, 3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: json.dumps(kind[0]))
def test_they_are_the_models(at: Served, kind: tuple[dict[str, Any], dict[str, Any]], top: int) -> None:
    asked, options = kind
    answer = at.client().completions.create(model=at.name, prompt=prompt(at), max_tokens=14, logprobs=top, **asked)
    source = at.tokens(prompt(at))
    found = wanted(at, source, seed=asked.get("seed", 0), max_new_tokens=14, **options)
    assert [choice.text for choice in answer.choices] == [one.text for one in found]
    assert any(len(one.tokens) > 4 for one in found)
    special = set(at.tokenizer.all_special_tokens)
    for choice, one in zip(answer.choices, found, strict=True):
        tokens = without_end(at, one.tokens)
        expected, shown = direct(at, source, tokens), choice.logprobs
        assert shown.token_logprobs == pytest.approx(own(expected, tokens), abs=1e-4)
        pieces = [piece for piece in shown.tokens if piece not in special]
        if not any("\ufffd" in piece for piece in pieces) and len(pieces) == len(shown.tokens):
            assert "".join(pieces) == choice.text
            assert shown.text_offset == [len("".join(pieces[:i])) for i in range(len(pieces))]
        for row, token, piece, named in zip(expected, tokens, shown.tokens, shown.top_logprobs, strict=True):
            best = row.topk(top) if top else None
            assert named[piece] >= float(row[token]) - 1e-4
            values = [] if best is None else best.values.tolist()
            assert top or list(named) == [piece]
            if len(named) == top + (token not in ([] if best is None else best.indices.tolist())):  # all read apart
                merged = sorted({*values, float(row[token])}, reverse=True)
                assert list(named.values()) == pytest.approx(merged, abs=1e-4)


def test_all_tokens_of_a_character_are_where_it_is(gpt2: Served) -> None:
    prompt = "宇宙 on 天地玄黄 mat é" + "地" * 9
    asked = dict(model=gpt2.name, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=0)
    shown, row = gpt2.client().completions.create(**asked).choices[0].logprobs, gpt2.tokens(prompt)
    places = [len(gpt2.tokenizer.decode(row[:i]).rstrip("\ufffd")) for i in range(len(row) + 1)]
    assert places[-1] == len(prompt) < len(row) and "\ufffd" in shown.tokens
    assert shown.text_offset[: len(row)] == places[:-1]


def test_the_score_of_a_beam_is_their_sum(at: Served) -> None:
    """Without a penalty of length, and where no end token is chosen."""
    asked = dict(extra_body=dict(num_beams=3, length_penalty=0.0, min_tokens=12))
    answer = at.client().completions.create(model=at.name, prompt=prompt(at), max_tokens=12, logprobs=0, **asked)
    (choice,) = answer.choices
    if at.is_seq2seq or choice.finish_reason != "length":
        pytest.skip("other rules change the scores, or the end token has one")
    assert sum(choice.logprobs.token_logprobs) == pytest.approx(choice.score, abs=1e-3)


def test_with_the_prompt(at: Served) -> None:
    if at.is_seq2seq:
        pytest.skip("echo is for decoder-only models")
    source = at.tokens(prompt(at))
    asked = dict(model=at.name, max_tokens=6, temperature=0, echo=True, logprobs=2)
    for given in (prompt(at), source):
        (choice,) = at.client().completions.create(prompt=given, **asked).choices
        (one,) = wanted(at, source, max_new_tokens=6)
        tokens = [*source, *without_end(at, one.tokens)]
        first, *others = choice.logprobs.token_logprobs
        expected = own(direct(at, source, without_end(at, one.tokens), whole=True), tokens[1:])
        assert first is None and others == pytest.approx(expected, abs=1e-4)
        assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.tokens) == len(tokens)


def test_where_a_stop_string_ends_a_text(llama: Served) -> None:
    asked = dict(
        model=llama.name, prompt="天地玄", max_tokens=20, temperature=0, logprobs=1, extra_body=dict(min_tokens=20)
    )
    whole = llama.client().completions.create(**asked).choices[0]
    stop = whole.text[6]
    cut = llama.client().completions.create(stop=stop, **asked)
    count = cut.usage.completion_tokens
    assert cut.choices[0].text == whole.text.partition(stop)[0]
    assert cut.choices[0].logprobs.token_logprobs == pytest.approx(whole.logprobs.token_logprobs[:count], abs=1e-4)
    assert cut.choices[0].logprobs.tokens[-1] == stop


def test_conversations(llama: Served) -> None:
    messages = [{"role": "user", "content": "天地"}]
    asked = dict(model=llama.name, messages=messages, max_tokens=9, temperature=0, logprobs=True)
    row = [1, *llama.tokenizer.convert_tokens_to_ids(["u", "天", "地", "</s>", "a"])]
    (one,) = wanted(llama, row, max_new_tokens=9)
    tokens = without_end(llama, one.tokens)
    expected = direct(llama, row, tokens)
    for top in (None, 4):
        more = {} if top is None else {"top_logprobs": top}
        (choice,) = llama.client().chat.completions.create(**asked, **more).choices
        content = choice.logprobs.content
        assert [each.logprob for each in content] == pytest.approx(own(expected, tokens), abs=1e-4)
        assert [each.token for each in content] == llama.tokenizer.convert_ids_to_tokens(tokens)
        assert all(bytes(each.bytes).decode() == each.token for each in content)
        for each, scores in zip(content, expected, strict=True):
            best = scores.topk(top or 0)
            assert [one.logprob for one in each.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [one.token for one in each.top_logprobs] == llama.tokenizer.convert_ids_to_tokens(
                best.indices.tolist()
            )


def test_they_are_null_unless_asked_for(llama: Served) -> None:
    client, asked = llama.client(), dict(model=llama.name, max_tokens=4, temperature=0)
    for more in (dict(), dict(logprobs=None), dict(logprobs=False)):
        assert client.completions.create(prompt="天", **asked, **more).choices[0].logprobs is None
    messages = [{"role": "user", "content": "天地"}]
    for more in (dict(), dict(logprobs=False), dict(logprobs=False, top_logprobs=0)):
        assert client.chat.completions.create(messages=messages, **asked, **more).choices[0].logprobs is None


def test_a_pass_that_fails_ends_its_own_request(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=llama.name, prompt="天", max_tokens=4, temperature=0, logprobs=1)
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "_of", lambda *_: [][0])
        with pytest.raises(openai.InternalServerError, match="The model failed with IndexError"):
            llama.client().completions.create(**asked)
    assert llama.client().completions.create(**asked).choices[0].logprobs.token_logprobs


def test_impossible_tokens_and_long_rows(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_AT_ONCE", 3)
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    logits[2, 4] = -float("inf")
    found = logprobs._of(logits, [0, 1, 4, 3, 2, 1, 0], 9)
    expected = logits.log_softmax(-1)
    assert [one.logprob for one in found] == [
        pytest.approx(float(expected[i, one.token])) if i != 2 else logprobs.LEAST for i, one in enumerate(found)
    ]
    assert [len(one.top) for one in found] == [5] * 7 and found[2].top[-1] == (4, logprobs.LEAST)
