"""The service over HTTP, without Ray: answers, refusals, limits, and bodies that nobody should send."""

from __future__ import annotations

import gc
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_kit import TEXTS, slowly, stock

import fastgen
from fastgen import report
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.optimizer.transformers import versions
from fastgen.pipeline.transformers import load, tokenizing
from fastgen.serving import app as http
from fastgen.serving import generation_request, metrics
from fastgen.serving.counts import Counts
from fastgen.serving.options import question

BODIES = int(os.environ.get("FASTGEN_FUZZ", "400"))  # malformed ones


def ask(client: Any, **body: Any) -> Any:
    return client.post("/v1/generate", json=body)


@pytest.mark.parametrize(
    "options",
    (
        dict(num_beams=4, max_new_tokens=20),
        dict(max_new_tokens=20),
        dict(num_beams=3, num_return_sequences=3, length_penalty=0.5, max_new_tokens=20),
        dict(do_sample=True, top_k=12, max_new_tokens=20, seed=7, num_return_sequences=2),
        dict(do_sample=True, num_beams=2, max_new_tokens=12, seed=3),
        dict(do_sample=True, top_h=0.4, max_new_tokens=12, seed=3),
        dict(encoder_repetition_penalty=1.5, max_new_tokens=12),
        dict(num_beams=2, sequence_bias=[[[16], -9.0], [[20, 21], 4.0]], max_new_tokens=12),
    ),
)
def test_answers_are_those_of_generate(client: Any, options: dict[str, Any]) -> None:
    answer = ask(client, text=TEXTS[:3], **options)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    seed = options.pop("seed", None)
    assert body["seed"] == seed
    for text, outputs in zip(TEXTS, body["outputs"], strict=False):
        texts, scores = stock(text, seed or 0, **options)
        assert [one["text"] for one in outputs] == texts
        assert [one["score"] for one in outputs] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("is_old", [False, True], ids=["", "old"])
def test_a_penalty_reaches_no_other_text(client: Any, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In versions of the host that have it reach other texts of a call, each text has a call of its own."""
    if is_old:
        monkeypatch.setattr(versions, "penalises_all_rows", lambda: False)
    texts, options = ["1 2 3", "4 5 6", "7 8 9"], dict(num_beams=2, encoder_repetition_penalty=1.5, max_new_tokens=12)
    report.reset()
    outputs = ask(client, text=texts, **options).json()["outputs"]
    assert [one[0]["text"] for one in outputs] == [stock(text, **options)[0][0] for text in texts]
    assert sorted(call.batch for call in report.calls() if call.tier != "stock") == ([1, 1, 1] if is_old else [3])


def test_a_seed_that_is_told_draws_the_same(client: Any) -> None:
    first = ask(client, text="1 2 3", do_sample=True, max_new_tokens=20).json()
    again = ask(client, text="1 2 3", do_sample=True, max_new_tokens=20, seed=first["seed"]).json()
    assert first == again


def _events(text: str) -> Iterator[Any]:
    *events, end, empty = text.split("\n\n")
    assert (end, empty) == ("data: [DONE]", "")
    for event in events:
        yield json.loads(event.removeprefix("data: "))


@pytest.mark.parametrize("options", (dict(), dict(do_sample=True, seed=5), dict(num_beams=4, length_penalty=-0.5)))
def test_a_stream_is_the_answer_in_pieces(
    client: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)  # or several pieces come at once
    texts = [max(TEXTS, key=len), TEXTS[1]]
    answer = ask(client, text=texts, stream=True, max_new_tokens=40, **options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    deltas, ends = ["", ""], {}
    for event in _events(answer.text):
        if "delta" in event:
            deltas[event["index"]] += event["delta"]
        else:
            ends[event["index"]] = event
    for index, text in enumerate(texts):
        asked = {name: value for name, value in options.items() if name != "seed"}
        wanted, scores = stock(text, options.get("seed", 0), max_new_tokens=40, **asked)
        assert deltas[index] == ends[index]["text"] == wanted[0]
        assert ends[index]["score"] == pytest.approx(scores[0], abs=1e-4)
    assert len(list(_events(answer.text))) > 6


def test_a_text_without_spaces_is_streamed_in_pieces(
    client: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    decoded = service.decoded
    monkeypatch.setattr(service, "decoded", lambda rows: [text.replace(" ", "") for text in decoded(rows)])
    text = max(TEXTS, key=len)
    *deltas, end = _events(ask(client, text=text, stream=True, max_new_tokens=40).text)
    assert "".join(event["delta"] for event in deltas) == end["text"]
    assert end["text"] == stock(text, max_new_tokens=40)[0][0].replace(" ", "") and len(deltas) > 4


@pytest.mark.parametrize(
    "body, status, what",
    (
        ({}, 422, "text is missing: the request needs it."),
        ({"text": ""}, 422, "at least 1 character"),
        ({"text": "  "}, 422, "text[0] is empty"),
        ({"text": ["1", "\t"]}, 422, "text[1] is empty"),
        ({"text": ["1", 5]}, 422, "text[1] should be a valid string."),
        ({"text": ["1", ""]}, 422, "text[1] should have at least 1 character."),
        ({"text": {}}, 422, "text should be a valid string or a valid list."),
        ({"text": ["1"] * 9}, 422, "at most 8 items"),
        ({"text": "1 " * 3000}, 422, "tokens, and there is room for"),
        ({"text": "1", "num_beams": 7}, 422, "num_beams should be less than or equal to 6."),
        ({"text": "1", "num_beams": "4"}, 422, "num_beams should be a valid integer."),
        ({"text": "1", "max_new_tokens": 65}, 422, "max_new_tokens"),
        ({"text": "1", "no_such_option": 1}, 422, "no_such_option is no field of the service: /docs lists the fields"),
        (
            {"text": "1", "num_beam_groups": 2},
            422,
            "num_beam_groups is a field of GenerationConfig that the service does",
        ),
        ({"text": "1", "max_length": 9}, 422, "max_new_tokens counts without the prompt"),
        ({"text": "1", "early_stopping": "x"}, 422, "early_stopping should be a valid boolean or 'never'."),
        ({"text": "1", "num_return_sequences": 3, "num_beams": 2}, 422, "transformers refuses"),
        ({"text": "1", "forced_bos_token_id": 10**6}, 422, "forced_bos_token_id"),
        ({"text": "1", "suppress_tokens": [3, -1]}, 422, "suppress_tokens[1] should be greater than or equal to 0."),
        ({"text": "1", "bad_words_ids": [[1], [2, "3"]]}, 422, "bad_words_ids[1][1] should be a valid integer."),
        ({"text": "1", "exponential_decay_length_penalty": [1]}, 422, "exponential_decay_length_penalty[1] is missing"),
        ({"text": "1", "bad_words_ids": [[]]}, 422, "bad_words_ids"),
        ({"text": "1", "timeout": 1e9}, 422, "timeout"),
        ({"text": "1", "stream": True, "num_beams": 4, "num_return_sequences": 2}, 422, "one output of each input"),
    ),
)
def test_what_cannot_be_used_is_a_sentence(client: Any, body: Any, status: int, what: str) -> None:
    answer = client.post("/v1/generate", json=body)
    assert (answer.status_code, what in answer.json()["detail"]) == (status, True), answer.text


def test_a_model_that_returns_several_streams_one(client: Any, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.own_generation_config, "num_beams", 2)
    monkeypatch.setattr(service.own_generation_config, "num_return_sequences", 2)
    answer = ask(client, text="1", stream=True)
    assert answer.status_code == 422 and "ask for num_return_sequences 1" in answer.json()["detail"]
    *_, end = _events(ask(client, text="1", stream=True, num_return_sequences=1).text)
    assert end["text"] == stock("1", num_beams=2)[0][0]


def test_the_example_on_the_page_is_answered(client: Any) -> None:
    schema = client.get("/openapi.json").json()["components"]["schemas"]["Question"]
    answer = ask(client, **schema["example"])
    assert answer.status_code == 200 and answer.json()["outputs"][0][0]["text"]


@pytest.mark.parametrize(
    "body, what",
    (
        (b'{"text": "1",\n "seed": }', "The body is no JSON at character 23 (line 2, column 10): Expecting value."),
        (b'{"text": "\xff"}', "The body is no JSON: byte 10 is no UTF-8."),
        (b"[" * 9_000, "The body is no JSON that can be read: lists or objects are nested too deep."),
        (b"9" * 6_000, "The body is no JSON that can be read: a number has too many digits."),
        (b"", "The body is empty: send an object of JSON with the field `text`."),
        (b"[]", "The body is no object of JSON: send an object with the field `text`."),
    ),
)
def test_a_body_that_is_no_json_is_told_where(client: Any, body: bytes, what: str) -> None:
    answer = client.post("/v1/generate", content=body, headers={"content-type": "application/json"})
    assert answer.json() == {"detail": what}


def test_a_body_that_does_not_say_what_it_is_and_pages_that_are_not_there(client: Any) -> None:
    said = [client.post("/v1/generate", content=b"{}"), client.get("/no/such"), client.get("/v1/generate")]
    assert [answer.status_code for answer in said] == [422, 404, 405]
    hints = ("send the header Content-Type: application/json", "/docs lists", "/docs lists")
    assert all(hint in answer.json()["detail"] for hint, answer in zip(hints, said, strict=True))


RAW = (
    (b"", 422),
    (b"{", 400),
    (b"[]", 422),
    (b"null", 422),
    (b"\xff\xfe", 400),
    (b'{"text": "\\ud800"}', 422),
    (b'{"text": "1", "\\ud800": 1}', 422),
    (b'{"text": "1", "temperature": NaN}', 422),
    (b'{"text": "1", "temperature": 1e999}', 422),
    (b'{"text": "1", "length_penalty": -Infinity}', 422),
    (b'{"text": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", 400),
    (b'{"text": "1", "seed": ' + b"9" * 6_000 + b"}", 400),
    (b'{"text": "1", "seed": 9223372036854775808}', 422),
    (b'{"text": "' + b"1 " * 20_000 + b'"}', 413),
)


@pytest.mark.parametrize("body, status", RAW, ids=[repr(body[:30]) for body, _ in RAW])
def test_bodies_that_are_no_request_are_refused(client: Any, body: bytes, status: int) -> None:
    for headers in ({"content-type": "application/json"}, {}):
        answer = client.post("/v1/generate", content=body, headers=headers)
        assert 400 <= answer.status_code < 500 and isinstance(answer.json()["detail"], str)
        if headers:
            assert answer.status_code == status, answer.text
    pieces = client.post("/v1/generate", content=iter([body[:7], body[7:]]))  # of a length that is not said
    assert 400 <= pieces.status_code < 500


def _garbled(chance: random.Random) -> bytes:
    """A good body with something wrong in it."""
    names = list(question_fields())
    values: list[Any] = [None, True, -1, 0, 2**70, 1e308, "", "x", [], [[]], {}, [None], {"a": 1}, "\u0000", [1] * 50]
    body: dict[str, Any] = {"text": "1 2", "max_new_tokens": 2}
    for _ in range(chance.randrange(1, 4)):
        body[chance.choice([*names, "x", ""])] = chance.choice(values)
    raw = bytearray(json.dumps(body).encode())
    if chance.random() < 0.5:
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(raw))
            raw[place : place + chance.randrange(3)] = bytes(chance.randrange(256) for _ in range(chance.randrange(3)))
    return bytes(raw)


def question_fields() -> Any:
    from fastgen.serving.limits import Limits

    return question(Limits()).model_fields


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_malformed_bodies_are_never_the_services_fault(client: Any, service: Any) -> None:
    chance, statuses, before = random.Random(9), set(), 0
    for number in range(BODIES):
        answer = client.post("/v1/generate", content=_garbled(chance), headers={"content-type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 413, 422), answer.text  # some are requests all the same
        if number == BODIES // 4:
            gc.collect()
            before = _resident()
    assert {400, 422} <= statuses
    gc.collect()
    assert _resident() - before < 64 << 20
    assert service.engine.is_alive


def test_a_token_is_asked_for(service: Any) -> None:
    from fastapi.testclient import TestClient

    with TestClient(http.build(service, "sesame")) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic x"},
            {"Authorization": "Bearer é"},
        ):
            answer = client.post(
                "/v1/generate", json={"text": "1"}, headers={k: v.encode() for k, v in headers.items()}
            )
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        answer = client.post("/v1/generate", json={"text": "1"}, headers={"Authorization": "Bearer sesame"})
        assert answer.status_code == 200
        for path in ("/metrics", "/docs", "/redoc", "/openapi.json", "/static-offline-docs/favicon.png", "/no/such"):
            assert client.get(path).status_code == 401, path
            found = client.get(path, headers={"Authorization": "bearer sesame"}).status_code
            assert found == (404 if path == "/no/such" else 200), path
        for path in ("/health", "/health/live", "/health/ready"):
            assert client.get(path).json() == {"status": "ok"}


def test_metrics_count(client: Any, service: Any) -> None:
    finished, good, bad = service.engine.counts.finished, service.statuses[200], service.statuses[422]
    ask(client, text="1 2 3", max_new_tokens=5)
    ask(client, text="")
    lines = client.get("/metrics").text.splitlines()
    labels = f'model="{SHIPPED_MODEL.name}",version="{fastgen.__version__}"'
    assert f"fastgen_finished_total{{{labels}}} {finished + 1}" in lines
    assert f'fastgen_requests_total{{{labels},status="200"}} {good + 1}' in lines
    assert f'fastgen_requests_total{{{labels},status="422"}} {bad + 1}' in lines
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    histograms = [line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" histogram")]
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert len(histograms) == 3
    assert names - {*histograms} | parts == {line.partition("{")[0] for line in lines if not line.startswith("#")}


def test_labels_are_escaped_and_tell_no_paths(tmp_path: Path) -> None:
    assert metrics.escaped('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
    assert metrics.shown("some/model") == "some/model"
    assert metrics.shown(f"{tmp_path}/") == tmp_path.name


def test_a_service_that_stops_says_so_and_lives(service: Any) -> None:
    from fastapi.testclient import TestClient

    with TestClient(http.build(service, None)) as client:
        service.stop()
        try:
            refused = [ask(client, text="1"), ask(client, text="1", stream=True), client.get("/health/ready")]
            assert [(one.status_code, one.headers["retry-after"]) for one in refused] == [(503, "1")] * 3
            assert [client.get(path).status_code for path in ("/health", "/health/live")] == [200, 200]
        finally:
            service._is_stopping = False
        assert ask(client, text="1").status_code == client.get("/health/ready").status_code == 200
        assert service.running == 0


def test_a_request_is_a_line_of_the_log_without_its_text(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastgen.serving")
    answer = ask(client, text=["1 2 3", "sesame"], max_new_tokens=5)
    client.get("/health")
    client.get("/metrics")
    client.get("/a%0Ab?sesame", headers={"Authorization": "Bearer sesame"})
    (first, second) = (record.getMessage() for record in caplog.records if record.name == "fastgen.serving")
    assert answer.status_code == 200 and re.fullmatch(
        r"POST /v1/generate 200 \d+ ms, inputs 2, tokens ([2-9]|1\d)", first
    )
    assert re.fullmatch(r"GET /a\\nb 404 \d+ ms, inputs 0, tokens 0", second)


@pytest.mark.parametrize("why, status", ((generation_request.Full, 429), (generation_request.Stopped, 503)))
def test_who_is_refused_hears_when_to_try_again(
    client: Any, service: Any, monkeypatch: pytest.MonkeyPatch, why: type[Exception], status: int
) -> None:
    def refuse(ask: Any) -> None:
        raise why

    monkeypatch.setattr(service.engine, "submit", refuse)
    answer = ask(client, text="1")
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")


def test_code_of_a_models_repository_never_runs(tmp_path: Path) -> None:
    from fastgen.pipeline.errors import InputError

    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    names = {"AutoConfig": "foreign.Config", "AutoModelForSeq2SeqLM": "foreign.Model", "AutoTokenizer": "foreign.T"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": names}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": names}))
    with pytest.raises(InputError, match="Cannot load the model"):
        load.load_config(str(tmp_path))
    with pytest.raises(InputError, match="Cannot load the tokenizer"):
        tokenizing.load_tokenizer(tokenizing.TokenizerSpec(str(tmp_path), "", None, None, None))
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any]]:
    """A decoder-only model with few positions: its client, the model and the tokenizer."""
    from fastapi.testclient import TestClient
    from serving_kit import loaded
    from transformers import GPT2Config, GPT2LMHeadModel

    from fastgen.cli import serve
    from fastgen.serving.limits import Limits
    from fastgen.serving.service import Service

    folder, tokenizer = tmp_path_factory.mktemp("causal"), loaded()[1]
    torch.manual_seed(2)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=48, vocab_size=len(tokenizer))
    ends = dict(bos_token_id=2, eos_token_id=2, pad_token_id=2)
    GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.4)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None)
    service = Service(settings.model, Limits(new_tokens=30), 64)
    with TestClient(http.build(service, None)) as client:
        yield client, GPT2LMHeadModel.from_pretrained(folder).eval(), tokenizer
    service.engine.close()


@pytest.mark.parametrize(
    "options", (dict(), dict(num_beams=3), dict(no_repeat_ngram_size=1), dict(num_beams=2, no_repeat_ngram_size=2))
)
def test_a_decoder_only_model_goes_on_as_if_alone(causal: Any, options: dict[str, Any]) -> None:
    client, model, tokenizer = causal
    texts = ["1", "2 3 4", "17 18", "5 6 7 8"]
    answer = ask(client, text=texts, max_new_tokens=12, **options)
    assert answer.status_code == 200, answer.text
    for text, (output,) in zip(texts, answer.json()["outputs"], strict=True):
        inputs = tokenizer(text, return_tensors="pt").input_ids
        with fastgen.disabled(), torch.no_grad():
            tokens = model.generate(inputs, max_new_tokens=12, **options)[0, inputs.shape[1] :]
        assert output["text"] == tokenizer.decode(tokens, skip_special_tokens=True)


LONG = "1 2 3 4 5 6 7 8 9 " * 2


def test_a_decoder_only_model_has_room_for_so_much(causal: Any) -> None:
    client, _, tokenizer = causal
    length = len(tokenizer(LONG).input_ids)
    answer = ask(client, text=["1", LONG], max_new_tokens=30)
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        f"text[1] has {length} tokens, max_new_tokens is 30, and the model has room for 48 together: "
        "send a shorter text, or ask for fewer tokens."
    )
    assert ask(client, text="1").status_code == 200


def test_a_page_describes_it(client: Any) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(loaded) >= 2 and not [place for place in loaded if "//" in place]  # from here alone
    assert all(client.get(place).status_code == 200 for place in loaded)
    described = client.get("/openapi.json").json()["paths"]["/v1/generate"]["post"]
    assert {"200", "401", "408", "413", "422", "429", "503", "504"} <= set(described["responses"])


def test_the_page_shows_what_the_service_logs_and_counts(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cluster.md").read_text("utf-8")
    (line,) = re.findall(r'^fastgen_requests_total{.*status="200"} \d+$', page, re.M)
    assert line in metrics.written("facebook/bart-large-cnn", Counts(), {200: int(line.split()[-1])}).splitlines()
    pattern = r"POST /v1/generate 200 \d+ ms, inputs \d+, tokens \d+$"
    assert re.search(rf"^INFO .*{pattern}", page, re.M)
    with caplog.at_level("INFO", logger="fastgen.serving"):
        ask(client, text=["1", "2 3"], max_new_tokens=5)
    assert re.fullmatch(pattern, caplog.messages[-1]) and "inputs 2," in caplog.messages[-1]
