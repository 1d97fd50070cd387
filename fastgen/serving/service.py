"""Answers requests with a model: tokenises texts, submits them to the engine, and decodes the results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from fastgen.pipeline.errors import InputError, WorkerError, counted, first_line
from fastgen.pipeline.transformers import generation_fields, prepare, tokenizing
from fastgen.pipeline.transformers.growing_text import settled
from fastgen.pipeline.transformers.load import decoder_room, generation_config, load_model
from fastgen.pipeline.transformers.settings import ModelSettings
from fastgen.pipeline.workers import WorkerPool
from fastgen.serving.base_engine import EXPIRED, STOPPED, BaseEngine
from fastgen.serving.engine import Engine
from fastgen.serving.generation_request import Event, Failed, Finished, Full, GenerationRequest, Grown, Stopped
from fastgen.serving.limits import Limits
from fastgen.serving.observed import Work
from fastgen.serving.options import finite, given

STOPPING = "The service is stopping: send the request again later, or to another."
_DEFAULT_TOKENS = 256  # tokens to generate, if neither the request nor the model says how many


class Refusal(Exception):
    """Raised to refuse a request, with the HTTP status and a sentence."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        """`field`, of the body, and `code`: for clients of OpenAI's endpoints."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code


class Names(NamedTuple):
    """What an endpoint calls the inputs and the options, for sentences to the client."""

    of_input: Callable[[int], str] = lambda index: f"text[{index}]"
    of_option: Callable[[str], str] = str
    field: str | None = None  # of all inputs, if one has no field of its own

    def field_of(self, index: int) -> str:
        """The body's field that an input is in."""
        return self.field or self.of_input(index)


GENERATE = Names()  # of /v1/generate


class Events:
    """The events of a request that have not been read yet; of each growing input only the newest is kept."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._grown: dict[int, Grown] = {}

    def put(self, event: Event) -> None:
        if isinstance(event, Grown):
            is_new = event.which not in self._grown
            self._grown[event.which] = event
            if not is_new:
                return
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        event = await self._queue.get()
        return self._grown.pop(event.which, event) if isinstance(event, Grown) else event


def _check_stream(options: Mapping[str, Any], own: Any) -> None:
    """Raise Refusal if /v1/generate does not stream a search with these options.

    `own`: the model's GenerationConfig.
    """
    name = "num_return_sequences"
    asked = int(options.get(name) or 1)
    if asked > 1 or (options.get(name) is None and int(getattr(own, name, None) or 1) > 1):
        what = f"leave out {name}" if asked > 1 else f"ask for {name} 1, where the model's own is more"
        raise Refusal(422, f"stream is for one output of each input: {what}.", name)


class BaseService:
    """What the services of all models have: limits, a name, counts, and an end."""

    engine: BaseEngine

    def __init__(self, name: str, limits: Limits) -> None:
        """`name`: of the model."""
        self.name, self.limits = name, limits
        self.statuses = Counter[int]()  # of the answers to /v1
        self.running = 0  # requests that are being answered
        self._is_stopping = False

    def stop(self) -> None:
        """Refuse requests from now on; running requests are still answered."""
        self._is_stopping = True

    def check_open(self) -> None:
        """Raise Refusal if the service is stopping."""
        if self._is_stopping:
            raise Refusal(503, STOPPING)


class Service(BaseService):
    """Loads the model once; `generate` and `stream` answer requests, on an event loop."""

    engine: Engine

    def __init__(self, settings: ModelSettings, limits: Limits, most_queued: int) -> None:
        """`settings`: their field `generation` has the defaults of requests."""
        super().__init__(settings.model, limits)
        known = prepare.prepared(settings)
        self._known, self._tokenizer = known, WorkerPool(0, tokenizing.build, known.spec)
        self.continues = not known.config.is_encoder_decoder  # else it answers a source
        self._model = load_model(settings.model, known.config, settings.dtype, known.device)
        self.engine = Engine(self._model, known.tokenizer, most_rows=limits.rows, most_queued=most_queued)
        self._most_new = min(limits.new_tokens, decoder_room(self._model) or limits.new_tokens)
        self._default_tokens = min(self._most_new, _DEFAULT_TOKENS)
        self.own_generation_config = self._model.generation_config
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self.cleans_up = _cleans_up(known.tokenizer)
        self.special_tokens = frozenset[int](known.tokenizer.all_special_ids)
        self.has_chat_template = bool(getattr(known.tokenizer, "chat_template", None))
        self._config({})  # raises errors in the settings before the first request

    async def generate(self, body: dict[str, Any], work: Work) -> dict[str, Any]:
        """Answer a request, and note its size in `work`; raises Refusal if there is no answer."""
        self.check_open()
        self.running += 1
        try:
            asked, events = await self._asked(body, work, streams=False)
            outputs: list[Any] = [None] * len(asked.inputs)
            async for event in self.events_of(asked, events):
                assert isinstance(event, Finished)
                work.tokens += sum(map(len, event.found.tokens))
                texts = await asyncio.to_thread(self.decoded, event.found.tokens)
                outputs[event.which] = [
                    {"text": text, "score": finite(score)}
                    for text, score in zip(texts, event.found.scores, strict=True)
                ]
        finally:
            self.running -= 1
        return {"outputs": outputs, "seed": asked.seed if asked.config.do_sample else None}

    async def stream(self, body: dict[str, Any], work: Work) -> AsyncIterator[str]:
        """Answer in server-sent events, and note the size in `work`; Refusal is raised before the first event."""
        self.check_open()
        _check_stream(body, self.own_generation_config)
        self.running += 1
        try:
            asked, events = await self._asked(body, work, streams=True)
            pieces = self._streamed(asked, events, work)
            await anext(pieces)  # from here on, closing `pieces` frees the row
        finally:
            self.running -= 1
        return pieces

    async def _streamed(self, asked: GenerationRequest, events: Events, work: Work) -> AsyncGenerator[str, None]:
        sent = [""] * len(asked.inputs)
        self.running += 1
        try:
            yield ""
            async for event in self.events_of(asked, events):
                if isinstance(event, Grown):
                    (text,) = await asyncio.to_thread(self.decoded, event.rows)
                    text = settled(text, self._known.tokenizer)
                    # Some tokenizers change a space later on: then the new text is not sent yet.
                    if len(text) > len(sent[event.which]) and text.startswith(sent[event.which]):
                        yield _event({"index": event.which, "delta": text[len(sent[event.which]) :]})
                        sent[event.which] = text
                elif isinstance(event, Finished):
                    work.tokens += sum(map(len, event.found.tokens))
                    (text,) = await asyncio.to_thread(self.decoded, event.found.tokens)
                    if text.startswith(sent[event.which]) and len(text) > len(sent[event.which]):
                        yield _event({"index": event.which, "delta": text[len(sent[event.which]) :]})
                    score = finite(event.found.scores[0])
                    yield _event({"index": event.which, "text": text, "score": score, "finished": True})
        except Refusal as refusal:  # too late for a status
            yield _event({"detail": refusal.message, "status": refusal.status})
        finally:
            self.running -= 1
            if asked.left:
                self.engine.cancel(asked)
        yield "data: [DONE]\n\n"

    async def _asked(self, body: dict[str, Any], work: Work, *, streams: bool) -> tuple[GenerationRequest, Events]:
        """Make a request from a body, and put it into the engine's queue."""
        texts = [body["text"]] if isinstance(body["text"], str) else list(body["text"])
        work.inputs = len(texts)
        for index, text in enumerate(texts):
            if not text.strip():
                raise Refusal(422, f"text[{index}] is empty: send at least one word.")
        inputs = await self.tokens_of(tokenizing.Encode(texts))
        return self.submit(inputs, given(body), seed=body.get("seed"), seconds=body.get("timeout"), streams=streams)

    def submit(
        self,
        inputs: list[list[int]],
        options: dict[str, Any],
        *,
        seed: int | None,
        seconds: float | None,
        streams: bool,
        stop: tuple[str, ...] = (),
        names: Names = GENERATE,
    ) -> tuple[GenerationRequest, Events]:
        """Put inputs into the engine's queue, on the event loop; raises Refusal if they cannot be generated.

        Args:
            inputs: the tokens of each.
            options: fields of GenerationConfig.
            seed: of sampling; by default one is chosen.
            seconds: the time for an answer, by default the limit.
            streams: whether there are events of inputs that grow.
            stop: texts that end a hypothesis; such requests share no batch.
        """
        try:
            config = self._config(options, names.of_option)
        except InputError as error:
            shown = [names.of_option(name) for name in options]
            field = next((name for name in shown if str(error).startswith(f"{name} ")), None)
            raise Refusal(422, str(error), field) from None
        beams, count = int(config.num_beams or 1), int(config.num_return_sequences or 1)
        if (rows := max(beams, count)) > self.limits.rows:
            what = f"The request needs {rows} rows, and {self.limits.rows} decode together"
            field = names.of_option("num_beams" if beams > count else "num_return_sequences")
            raise Refusal(422, f"{what}: ask for fewer beams or samples.", field)
        self._check_room(inputs, int(config.max_new_tokens), names)
        loop, events = asyncio.get_running_loop(), Events()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(events.put, event)

        asked = GenerationRequest(
            inputs,
            config,
            hashlib.sha256(json.dumps([options, stop], sort_keys=True).encode()).digest(),
            tell,
            stop=stop,
            seed=secrets.randbits(31) if seed is None else seed,
            streams=streams,
            deadline=time.monotonic() + (seconds or self.limits.seconds),
        )
        try:
            self.engine.submit(asked)
        except Full:
            raise Refusal(429, "The queue is full: send the request again later.") from None
        except Stopped:
            raise Refusal(503, STOPPED) from None
        return asked, events

    async def events_of(self, asked: GenerationRequest, events: Events) -> AsyncIterator[Event]:
        """Yield events until all inputs are finished; if the reader stops or is cancelled, the rows are freed."""
        missing = len(asked.inputs)
        try:
            while missing:
                # The engine checks deadlines, but not while the host's own `generate` runs.
                left = asked.deadline - time.monotonic() + 1.0
                try:
                    event = await asyncio.wait_for(events.get(), max(left, 0.0))
                except asyncio.TimeoutError:
                    event = Failed(504, EXPIRED)
                if isinstance(event, Failed):
                    raise Refusal(event.status, event.message)
                missing -= isinstance(event, Finished)
                yield event
        finally:
            if missing:
                self.engine.cancel(asked)

    def _config(self, fields: dict[str, Any], shown: Callable[[str], str] = str) -> Any:
        known = self._known
        generation_fields.check(fields, shown)
        config = generation_config(self._model, known.tokenizer, {**known.given, **fields}, known.language, shown)
        if "max_new_tokens" not in fields:
            longest = config.max_new_tokens or (config.max_length or 1) - 1  # without the decoder's start
            # 20 is transformers' default, which means nothing; and a length that counts the prompt would depend on the
            # other requests in the batch.
            says_nothing = longest < 20 or not known.config.is_encoder_decoder
            config.max_new_tokens = min(self._default_tokens if says_nothing else longest, self._most_new)
            config.max_length = None
        if not known.config.is_encoder_decoder:
            config.min_length = 0
        config.return_dict_in_generate = config.output_scores = True
        config._fastgen_sequence_scores_only = True
        return config

    def _check_room(self, inputs: list[list[int]], new_tokens: int, names: Names) -> None:
        """Refuse inputs that are too long, with the new tokens, for the positions of a decoder-only model."""
        positions = getattr(self._known.config, "max_position_embeddings", None)
        for index, tokens in enumerate(inputs):
            if positions is not None and self.continues and len(tokens) + new_tokens > positions:
                raise Refusal(
                    422,
                    f"{names.of_input(index)} has {counted(len(tokens), 'token')}, {names.of_option('max_new_tokens')} "
                    f"is {new_tokens}, and the model has room for {positions} together: "
                    "send a shorter text, or ask for fewer tokens.",
                    names.field_of(index),
                )

    def default_new_tokens(self, inputs: list[list[int]]) -> int | None:
        """How many new tokens a decoder-only model has room for after each input, at most the default; None if the
        model has no such limit, or no room at all.
        """
        positions = getattr(self._known.config, "max_position_embeddings", None)
        room = None if positions is None or not self.continues else positions - max(map(len, inputs))
        return min(self._default_tokens, room) if room is not None and room > 0 else None

    async def tokens_of(
        self, task: tokenizing.Encode | tokenizing.EncodeChat, names: Names = GENERATE
    ) -> list[list[int]]:
        """The tokens of each input; Refusal for those that cannot be used."""
        try:
            found: list[list[int]] = await asyncio.to_thread(lambda: self._tokenizer.submit(task).result())
        except WorkerError as error:
            what = "tokenizer cannot read the text" if isinstance(task, tokenizing.Encode) else "chat template refuses"
            field = None if isinstance(task, tokenizing.Encode) and len(task.texts) > 1 else names.field_of(0)
            raise Refusal(422, f"The {what}: {first_line(error)}.", field) from None
        self.check_tokens(found, names)
        return [list(tokens) for tokens in found]

    def check_tokens(self, inputs: list[list[int]], names: Names) -> None:
        """Raise Refusal for inputs without tokens, or with more than there is room for."""
        room = min(self.limits.input_tokens, self._known.limit or self.limits.input_tokens)
        for index, tokens in enumerate(inputs):
            if not tokens:
                raise Refusal(
                    422, f"{names.of_input(index)} has no tokens: send at least one word.", names.field_of(index)
                )
            if len(tokens) > room:
                what = f"{names.of_input(index)} has {counted(len(tokens), 'token')}, and there is room for {room}"
                raise Refusal(422, f"{what}: send a shorter one.", names.field_of(index))

    def decoded(self, rows: list[list[int]], *, special: bool = False) -> list[str]:
        """The text of each of these rows of tokens; special tokens are left out, unless `special`."""
        texts: list[str] = self._tokenizer.submit(tokenizing.Decode(rows, special)).result()
        return texts


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding takes out spaces, before a comma and the like: for BPE some versions of the host never do it."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    tokens = tokenizer("it is , a . b ! c ? do n't", add_special_tokens=False).input_ids
    return bool(tokenizer.decode(tokens) != tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
