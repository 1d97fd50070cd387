"""A model behind its tokenizer and the engine, for as many requests as come."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastgen.cli.transformers import flags, prepare, tokenizing
from fastgen.cli.transformers.load import generation_config, load_model
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.workers import WorkerPool
from fastgen.serving.engine import Ask, Engine, Event, Failed, Finished, Full, Grown
from fastgen.serving.limits import Limits
from fastgen.serving.options import finite, given


class Refusal(Exception):
    """A request that gets no answer: HTTP's status, and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Service:
    """Loads the model once; `generate` and `stream` answer requests, on an event loop."""

    def __init__(self, args: argparse.Namespace, limits: Limits, most_queued: int) -> None:
        """`args`: as `fastgen-generate-transformers` has them; its generation flags are the requests' defaults."""
        self.limits, self._args = limits, args
        known = prepare.prepared(args)
        self._known, self._tokenizer = known, WorkerPool(0, tokenizing.build, known.spec)
        self._model = load_model(args.model, known.config, args.dtype, known.device)
        self.engine = Engine(self._model, most_rows=limits.rows, most_queued=most_queued)
        self._default_tokens = min(limits.new_tokens, 256)
        self._config({})  # what can't be used shows before the first request

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer; Refusal if there is none."""
        ask, events = await self._asked(body, streams=False)
        outputs: list[Any] = [None] * len(ask.inputs)
        async for event in self._events(ask, events):
            assert isinstance(event, Finished)
            texts = self._decoded(event.found.tokens)
            outputs[event.which] = [
                {"text": text, "score": finite(score)} for text, score in zip(texts, event.found.scores, strict=True)
            ]
        return {"outputs": outputs, "seed": ask.seed if ask.config.do_sample else None}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Server-sent events; Refusal is raised here, before the first one."""
        if int(body.get("num_beams") or 1) > 1 or int(body.get("num_return_sequences") or 1) > 1:
            raise Refusal(422, "stream: only greedy search and single samples can be streamed, since beams change")
        ask, events = await self._asked({**body, "num_beams": 1}, streams=True)
        return self._streamed(ask, events)

    async def _streamed(self, ask: Ask, events: asyncio.Queue[Event]) -> AsyncIterator[str]:
        sent = [""] * len(ask.inputs)
        try:
            async for event in self._events(ask, events):
                if isinstance(event, Grown):
                    text = self._decoded([event.tokens])[0]
                    text = text[: text.rfind(" ") + 1]  # the last word may go on
                    # Some tokenizers change their mind about a space: then what follows waits.
                    if len(text) > len(sent[event.which]) and text.startswith(sent[event.which]):
                        yield _event({"index": event.which, "delta": text[len(sent[event.which]) :]})
                        sent[event.which] = text
                elif isinstance(event, Finished):
                    text = self._decoded(event.found.tokens)[0]
                    if text.startswith(sent[event.which]) and len(text) > len(sent[event.which]):
                        yield _event({"index": event.which, "delta": text[len(sent[event.which]) :]})
                    score = finite(event.found.scores[0])
                    yield _event({"index": event.which, "text": text, "score": score, "finished": True})
        except Refusal as refusal:  # too late for a status
            yield _event({"detail": refusal.message, "status": refusal.status})
        yield "data: [DONE]\n\n"

    async def _asked(self, body: dict[str, Any], *, streams: bool) -> tuple[Ask, asyncio.Queue[Event]]:
        """The request in the engine's queue."""
        texts = [body["text"]] if isinstance(body["text"], str) else list(body["text"])
        for index, text in enumerate(texts):
            if not text.strip():
                raise Refusal(422, f"text {index} is empty")
        fields = given(body)
        try:
            config = self._config(fields)
        except InputError as error:
            raise Refusal(422, str(error)) from None
        inputs = await asyncio.to_thread(self._encoded, texts)
        rows = max(int(config.num_beams or 1), int(config.num_return_sequences or 1))
        if rows > self.limits.rows:
            raise Refusal(422, f"num_beams {rows}: at most {self.limits.rows} rows decode together here")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        seconds = body.get("timeout") or self.limits.seconds
        ask = Ask(
            inputs,
            config,
            json.dumps(fields, sort_keys=True),
            tell,
            seed=secrets.randbits(31) if body.get("seed") is None else body["seed"],
            streams=streams,
            deadline=time.monotonic() + seconds,
        )
        try:
            self.engine.submit(ask)
        except Full:
            raise Refusal(429, "the queue is full: try again later") from None
        return ask, events

    async def _events(self, ask: Ask, events: asyncio.Queue[Event]) -> AsyncIterator[Event]:
        """Until all inputs are finished. Whoever stops listening, or is cancelled, frees the rows."""
        missing = len(ask.inputs)
        try:
            while missing:
                # The engine keeps the time, but while the host's own generate runs nobody asks it.
                left = ask.deadline - time.monotonic() + 1.0
                try:
                    event = await asyncio.wait_for(events.get(), max(left, 0.0))
                except TimeoutError:
                    event = Failed(504, "the request took longer than it may")
                if isinstance(event, Failed):
                    raise Refusal(event.status, event.message)
                missing -= isinstance(event, Finished)
                yield event
        finally:
            if missing:
                self.engine.cancel(ask)

    def _config(self, fields: dict[str, Any]) -> Any:
        known = self._known
        flags.check(fields, str)
        config = generation_config(self._model, known.tokenizer, {**known.given, **fields}, known.language, str)
        if "max_new_tokens" not in {**known.given, **fields} and config.max_new_tokens is None:
            longest = config.max_length or 0
            if longest <= 20 or longest > self.limits.new_tokens:  # transformers' default, which says nothing
                config.max_new_tokens, config.max_length = self._default_tokens, None
        config.return_dict_in_generate = config.output_scores = True
        config._fastgen_sequence_scores_only = True
        return config

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        limit = self.limits.input_tokens
        room = min((one for one in (limit, self._known.limit) if one is not None), default=None)
        found: list[list[int]] = self._tokenizer.submit(tokenizing.Encode(texts)).result()
        for index, tokens in enumerate(found):
            if not tokens:
                raise Refusal(422, f"text {index} has no tokens")
            if room is not None and len(tokens) > room:
                raise Refusal(422, f"text {index} has {len(tokens)} tokens, and there is room for {room}")
        return [list(tokens) for tokens in found]

    def _decoded(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.submit(tokenizing.Decode(rows)).result()
        return texts

    def metrics(self) -> str:
        """In the text format of Prometheus."""
        lines: list[str] = []
        for name, value in asdict(self.engine.counts).items():
            kind = "gauge" if name in ("running", "queued") else "counter"
            full = f"fastgen_{name}" + ("" if kind == "gauge" else "_total")
            lines += [f"# HELP {full} {_HELP[name]}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "\n".join(lines) + "\n"


_HELP = {
    "requests": "Requests that entered the queue",
    "finished": "Requests that were answered",
    "failed": "Requests that failed, those beyond their deadline among them",
    "refused": "Requests refused since the queue was full",
    "expired": "Requests that took longer than they may",
    "cancelled": "Requests whose client went away",
    "freed_rows": "Rows that left a batch before their end",
    "inputs": "Inputs of all requests",
    "tokens": "Tokens generated",
    "steps": "Steps of the batches",
    "rows": "Rows decoded, summed over the steps",
    "running": "Rows that decode now",
    "queued": "Inputs that wait now",
}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
