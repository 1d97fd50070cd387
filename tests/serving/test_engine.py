"""The engine: each request gets what `generate` gives it alone, whatever shares its batch, or frees its rows."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from serving_kit import TEXTS, config_of, loaded, slowly, stock
from transformers import ExponentialDecayLengthPenalty

import fastgen
from fastgen.optimizer.transformers.generate.continuous_batch import ContinuousBatch
from fastgen.serving import engine as engines
from fastgen.serving.apart import generate_apart
from fastgen.serving.base_engine import EXPIRED, STOPPED
from fastgen.serving.engine import Engine
from fastgen.serving.generation_request import Event, Failed, Finished, Full, GenerationRequest, Grown, Stopped

KINDS: list[dict[str, Any]] = [
    dict(num_beams=4, max_new_tokens=30),
    dict(num_beams=4, max_new_tokens=5, length_penalty=0.3),
    dict(num_beams=4, num_return_sequences=3, no_repeat_ngram_size=2, max_new_tokens=20),
    dict(num_beams=2, max_new_tokens=20, early_stopping=True, repetition_penalty=1.2),
    dict(max_new_tokens=20),
    dict(max_new_tokens=1),
    dict(max_new_tokens=20, repetition_penalty=1.5),
    dict(max_new_tokens=20, do_sample=True),
    dict(max_new_tokens=20, do_sample=True, num_return_sequences=4, top_k=9),
    dict(max_new_tokens=20, do_sample=True, num_beams=2),  # decoded apart
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(loaded()[0], most_rows=32, most_queued=50)
    yield engine
    engine.close()


def ask_of(texts: list[str], *, seed: int = 0, **more: Any) -> tuple[GenerationRequest, list[Event]]:
    events: list[Event] = []
    extra = {name: more.pop(name) for name in ("streams",) if name in more}
    inputs = loaded()[1](texts).input_ids
    config, key = config_of(**more), str(sorted(more.items()))
    return GenerationRequest(inputs, config, key, events.append, seed=seed, **extra), events


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait(*asks: GenerationRequest) -> None:
    until(lambda: all(ask.is_over for ask in asks))


def texts_of(event: Event) -> list[str]:
    assert isinstance(event, Finished), event
    return list(loaded()[1].batch_decode(event.found.tokens, skip_special_tokens=True))


def test_answers_are_those_of_generate_whatever_shares_the_batch() -> None:
    engine = Engine(loaded()[0], most_rows=32, most_queued=500)
    chance, asked = random.Random(4), []
    for number in range(80):
        options, text = KINDS[number % len(KINDS)], chance.choice(TEXTS)
        ask, events = ask_of([text], seed=number, **options)
        engine.submit(ask)
        asked.append((ask, events, text, number, options))
        time.sleep(chance.random() * 0.01)
    wait(*(ask for ask, *_ in asked))
    for _, (event,), text, seed, options in asked:
        texts, scores = stock(text, seed, **options)
        assert texts_of(event) == texts
        assert event.found.scores == pytest.approx(scores, abs=1e-4)
    counts = engine.counts
    assert (counts.requests, counts.finished, counts.failed) == (80, 80, 0)
    assert counts.rows / counts.steps > 8  # they did share
    engine.close()


def test_a_list_is_answered_input_by_input(engine: Engine) -> None:
    ask, events = ask_of(TEXTS[:20], **KINDS[0])
    engine.submit(ask)
    wait(ask)
    assert sorted(event.which for event in events) == list(range(20))
    for event in events:
        assert texts_of(event) == stock(TEXTS[event.which], **KINDS[0])[0]


@pytest.mark.parametrize("options", (dict(), dict(num_beams=4), dict(num_beams=3, early_stopping="never")))
def test_what_streams_grows_into_what_is_finished(engine: Engine, options: dict[str, Any]) -> None:
    ask, events = ask_of([TEXTS[3]], streams=True, max_new_tokens=30, **options)
    other, _ = ask_of([TEXTS[4]], max_new_tokens=30, **options)
    engine.submit(ask)
    engine.submit(other)
    wait(ask, other)
    *grown, last = events
    assert texts_of(last) == stock(TEXTS[3], max_new_tokens=30, **options)[0]
    assert isinstance(last, Finished) and len(grown) > 2
    for before, after in zip(grown, [*grown[1:], None], strict=True):
        assert isinstance(before, Grown)
        (row,), (longer,) = before.rows, last.found.tokens if after is None else after.rows
        assert longer[: len(row)] == row and before.scores == [None]


def test_samples_that_stream_grow_until_each_has_ended(engine: Engine) -> None:
    options = dict(max_new_tokens=30, do_sample=True, num_return_sequences=4, temperature=3.0)
    ask, events = ask_of([TEXTS[3]], streams=True, seed=6, **options)
    engine.submit(ask)
    wait(ask)
    *grown, last = events
    assert isinstance(last, Finished) and texts_of(last) == stock(TEXTS[3], 6, **options)[0]
    seen: list[list[float | None]] = []
    for event in grown:
        assert isinstance(event, Grown)
        seen.append(event.scores)
        for row, score, whole, final in zip(event.rows, event.scores, *last.found, strict=True):
            assert (row == whole and score == final) if score is not None else whole[: len(row)] == row
    assert any(None in scores and any(scores) for scores in seen)  # some have ended before the others


def test_who_goes_away_or_waits_too_long_frees_its_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    long = dict(num_beams=4, min_new_tokens=90, max_new_tokens=100)
    gone, heard = ask_of(TEXTS[:2], **long)
    late, told = ask_of(TEXTS[2:4], **long)
    stays, events = ask_of(TEXTS[4:6], **long)
    for ask in (gone, late, stays):
        engine.submit(ask)
    until(lambda: engine.counts.running == 24)
    engine.cancel(gone)
    late.deadline = time.monotonic()
    wait(gone, late, stays)
    assert heard == [] and [type(event) for event in told] == [Failed]
    assert told[0].status == 504  # type: ignore[union-attr]
    assert engine.counts.freed_rows == 16 and engine.counts.cancelled == 1 and engine.counts.expired == 1
    for event in events:
        assert texts_of(event) == stock(TEXTS[4 + event.which], **long)[0]


def test_a_full_queue_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    asks = []
    with pytest.raises(Full):
        for _ in range(12):
            ask, _ = ask_of(TEXTS[:8], num_beams=4, max_new_tokens=20)
            engine.submit(ask)
            asks.append(ask)
    assert engine.counts.refused == 1 and len(asks) >= 6
    wait(*asks)
    ask, (*_,) = ask_of(TEXTS[:1], num_beams=4)
    engine.submit(ask)  # there is room again
    wait(ask)


def test_a_model_that_fails_fails_its_requests_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()[0]
    encode, broken = type(model.model.encoder).forward, threading.Event()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("no such luck")
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.encoder), "forward", forward)
    good, events = ask_of(TEXTS[:1], **KINDS[0])
    engine.submit(good)
    wait(good)
    broken.set()
    bad, told = ask_of(TEXTS[:1], **KINDS[0])
    engine.submit(bad)
    wait(bad)
    assert told == [Failed(500, "The model failed with RuntimeError: no such luck.")]
    broken.clear()
    again, events = ask_of(TEXTS[:1], **KINDS[0])
    engine.submit(again)
    wait(again)
    assert texts_of(events[0]) == stock(TEXTS[0], **KINDS[0])[0] and engine.is_alive


def test_a_device_that_is_lost_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an illegal access on a GPU: nothing works there any more in this process."""
    engine, lost = Engine(loaded()[0]), RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise lost

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatch, "step", fails)
        patch.setattr(torch, "zeros", fails)
        ask, told = ask_of(TEXTS[:1], num_beams=2)
        engine.submit(ask)
        wait(ask)
        until(lambda: not engine.is_alive)
    assert [type(event) for event in told] == [Failed] and told[0].status == 500  # type: ignore[union-attr]
    with pytest.raises(Stopped):
        engine.submit(ask_of(TEXTS[:1])[0])
    engine.close()


def test_prompts_that_do_not_fit_together_enter_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = type(loaded()[0].model.encoder)
    encode, sizes = encoder.forward, []

    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(input_ids.shape[0])
        if input_ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(encoder, "forward", forward)
    ask, events = ask_of(TEXTS[:7], **KINDS[0])
    engine.submit(ask)
    wait(ask)
    assert max(sizes) == 7 and len(events) == 7
    monkeypatch.undo()
    for event in events:
        assert texts_of(event) == stock(TEXTS[event.which], **KINDS[0])[0]  # type: ignore[union-attr]


def test_inputs_of_the_hosts_search_that_do_not_fit_together_are_decoded_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, sizes = Engine(*loaded(), most_rows=32), list[int]()

    def apart(model: Any, tokenizer: Any, call: Any, requests: Any) -> Any:
        sizes.append(len(requests))
        if len(requests) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate_apart(model, tokenizer, call, requests)

    monkeypatch.setattr(engines, "generate_apart", apart)
    ask, events = ask_of(TEXTS[:7], **KINDS[0])
    ask.stop = ("no such text",)
    engine.submit(ask)
    wait(ask)
    assert sizes[0] == 7 and len(events) == 7
    for event in events:
        assert texts_of(event) == stock(TEXTS[event.which], **KINDS[0])[0]  # type: ignore[union-attr]
    engine.close()


@pytest.mark.parametrize("options", (dict(num_beams=4), dict(do_sample=True)))
def test_options_that_fail_fail_their_request_alone(
    engine: Engine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflows(self: Any, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 3:
            raise OverflowError("too large")
        return scores

    monkeypatch.setattr(ExponentialDecayLengthPenalty, "__call__", overflows)
    good, events = ask_of(TEXTS[:3], **options, seed=3, min_new_tokens=10, max_new_tokens=20)
    bad, told = ask_of(
        TEXTS[3:5], **options, exponential_decay_length_penalty=(0, 1.1), min_new_tokens=9, max_new_tokens=20
    )
    engine.submit(good)
    engine.submit(bad)
    wait(good, bad)
    assert [type(event) for event in told] == [Failed] and told[0].status == 422  # type: ignore[union-attr]
    for event in events:
        wanted = stock(TEXTS[event.which], 3, **options, min_new_tokens=10, max_new_tokens=20)[0]  # type: ignore[union-attr]
        assert texts_of(event) == wanted
    later, events = ask_of(TEXTS[:1], **options, max_new_tokens=20)
    engine.submit(later)
    wait(later)
    assert texts_of(events[0]) == stock(TEXTS[0], **options, max_new_tokens=20)[0]


def test_one_of_many_rows_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded()[0], most_rows=32)
    slowly(monkeypatch)
    asked = [ask_of([text], max_new_tokens=12, min_new_tokens=10)[0] for text in TEXTS * 3]
    large, _ = ask_of(TEXTS[:1], num_beams=24, max_new_tokens=4)
    for ask in [*asked[:35], large, *asked[35:]]:
        engine.submit(ask)
    wait(large)
    assert sum(not ask.is_over for ask in asked) > 0
    wait(*asked)
    engine.close()


def test_a_search_of_the_hosts_that_the_deadline_cuts_off_is_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(model: Any, tokenizer: Any, call: Any, requests: list[GenerationRequest]) -> Any:
        for one in requests:
            one.deadline = time.monotonic() - 1
        found = generate_apart(model, tokenizer, call, requests)
        assert len(found[0].tokens[0]) < 10  # it has been cut off
        return found

    monkeypatch.setattr(engines, "generate_apart", late)
    ask, told = ask_of(TEXTS[:1], do_sample=True, num_beams=2, min_new_tokens=20, max_new_tokens=20)
    engine.submit(ask)
    wait(ask)
    assert told == [Failed(504, EXPIRED)]
    assert (engine.counts.expired, engine.counts.finished) == (1, 0)


def test_searches_of_the_hosts_leave_a_batch_as_much_time_as_they_take(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    steps: list[int] = []

    def apart(*args: Any) -> Any:
        steps.append(engine.counts.steps)
        time.sleep(0.6)
        return generate_apart(*args)

    monkeypatch.setattr(engines, "generate_apart", apart)
    batched, _ = ask_of(TEXTS[:1], min_new_tokens=90, max_new_tokens=95)
    engine.submit(batched)
    until(lambda: engine.counts.running == 1)
    asked = [ask_of(TEXTS[:1], do_sample=True, num_beams=2, max_new_tokens=4)[0] for _ in range(3)]
    for ask in asked:
        engine.submit(ask)
    wait(*asked)
    assert len(steps) == 3 and all(after - before >= 4 for before, after in itertools.pairwise(steps))
    wait(batched)


def test_many_long_requests_do_not_hold_up_a_short_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if each is a call of its own, since all have other options."""
    slowly(monkeypatch)
    long = [ask_of([text], min_new_tokens=90, max_new_tokens=91 + n)[0] for n, text in enumerate(TEXTS[:8])]
    for ask in long:
        engine.submit(ask)
    until(lambda: engine.counts.running == 8)
    short, events = ask_of(TEXTS[9:10], max_new_tokens=4)
    engine.submit(short)
    wait(short)
    assert not any(ask.is_over for ask in long)
    assert texts_of(events[0]) == stock(TEXTS[9], max_new_tokens=4)[0]
    wait(*long)


def test_a_result_that_cannot_be_read_fails_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*args: Any) -> Any:
        raise ValueError("no such luck")

    monkeypatch.setattr(engines, "unrefillable", lambda *args, **kwargs: None)  # which is wrong: it can't share a batch
    monkeypatch.setattr(engines, "hypotheses_of", unreadable)
    ask, told = ask_of(TEXTS[:1], do_sample=True, num_beams=2, max_new_tokens=4)
    engine.submit(ask)
    wait(ask)
    assert told == [Failed(422, "transformers refuses to generate: no such luck.")]


def test_an_engine_that_has_lost_its_device_takes_nothing_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, refused = Engine(loaded()[0], most_rows=2), list[type[Exception]]()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def again(event: Event) -> None:
        try:
            engine.submit(ask_of(TEXTS[:1])[0])
        except Stopped as stopped:
            refused.append(type(stopped))

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatch, "step", fails)
        patch.setattr(torch, "zeros", fails)
        running, _ = ask_of(TEXTS[:1], num_beams=2)
        waits, _ = ask_of(TEXTS[:1], num_beams=2, max_new_tokens=5)
        waits.listener = again
        with engine._changed:  # both are there before it begins
            engine.submit(running)
            engine.submit(waits)
        wait(running, waits)
        until(lambda: not engine.is_alive)
    assert refused == [Stopped]
    engine.close()


def test_an_engine_that_is_closed_takes_nothing() -> None:
    engine = Engine(loaded()[0])
    engine.close()
    with pytest.raises(Stopped):
        engine.submit(ask_of(TEXTS[:1])[0])


def test_an_engine_that_is_closed_answers_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded()[0], most_rows=4)
    slowly(monkeypatch)
    asked = [ask_of([text], num_beams=4, min_new_tokens=90, max_new_tokens=100) for text in TEXTS[:3]]
    for ask, _ in asked:
        engine.submit(ask)
    time.sleep(0.1)
    engine.close()
    assert [events for _, events in asked] == [[Failed(503, STOPPED)]] * 3


def test_idle_batches_let_go_of_their_memory(engine: Engine) -> None:
    ask, _ = ask_of(TEXTS[:4], **KINDS[0])
    engine.submit(ask)
    wait(ask)
    until(lambda: not engine._batches)
    assert not engine._units and torch.is_grad_enabled()


@pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 has other configurations for rotations")
@pytest.mark.parametrize("options", [dict(num_beams=3), dict(do_sample=True, top_k=0), {}], ids=str)
def test_a_long_prompt_does_not_rotate_the_positions_of_others(options: dict[str, Any]) -> None:
    """Frequencies go by the longest row (`longrope`): it has a call of its own, and its seed, whoever came before."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[1.5, 3.0, 6.0, 9.0])
    rope["original_max_position_embeddings"] = 32
    family = zoo._model(
        "LlamaForCausalLM", "LlamaConfig", zoo.GROUPED, max_position_embeddings=256, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = family().eval()
    draw = random.Random(2)
    short, long, warm = ([draw.randrange(5, 55) for _ in range(length)] for length in (7, 50, 6))
    config = config_of(max_new_tokens=8, **options)
    config.pad_token_id, config.eos_token_id = zoo.PAD, zoo.UNUSED

    def stock_of(prompt: list[int]) -> list[int]:
        with fastgen.disabled(), torch.no_grad():
            torch.manual_seed(1)
            tokens = model.generate(torch.tensor([prompt]), generation_config=config, return_dict_in_generate=False)
        return tokens[0, len(prompt) :].tolist()

    engine = Engine(model, most_rows=32)
    try:
        for inputs in ([warm], [long], [short], [short, long], [long]):
            events: list[Event] = []
            request = GenerationRequest(inputs, config, "same", events.append, seed=1)
            engine.submit(request)
            wait(request)
            found = {event.which: event.found.tokens[0] for event in events if isinstance(event, Finished)}
            if not (options.get("do_sample") and len(inputs) > 1):  # a second input draws on
                assert [found[number] for number in range(len(inputs))] == [stock_of(prompt) for prompt in inputs]
    finally:
        engine.close()
