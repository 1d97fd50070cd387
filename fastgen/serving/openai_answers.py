"""Answers requests to OpenAI's endpoints with the service's engine, whole or in server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastgen.pipeline.transformers.growing_text import INCOMPLETE, GrowingText, stop_in, tokens_until
from fastgen.pipeline.transformers.hypotheses import Hypotheses
from fastgen.serving.generation_request import Finished, Grown
from fastgen.serving.observed import Work
from fastgen.serving.openai_errors import problem, status_of
from fastgen.serving.openai_logprobs import Logprobs
from fastgen.serving.openai_search import SearchRequest
from fastgen.serving.options import finite
from fastgen.serving.service import Names, Refusal, Service

CONTEXT = 5  # tokens of a prompt that are decoded with the new ones: some tokenizers drop a space at the beginning


class Piece(NamedTuple):
    """A part of a choice's text."""

    choice: int  # the number
    text: str
    finish_reason: str | None = None  # "stop" or "length" in a choice's last piece
    tokens: int = 0  # of the whole choice, in the last piece
    score: float | None = None
    row: Sequence[int] = ()  # the tokens of the choice so far, after a decoder's start
    logprobs: dict[str, Any] | None = None  # of the piece in a stream, else of the choice in the last piece


@dataclass
class Inputs:
    """The inputs of a request, and how their texts begin."""

    tokens: list[list[int]]
    names: Names
    prefixes: list[str] = field(default_factory=list)  # what each text begins with, if anything
    goes_on: bool = False  # whether each text goes on from that of the prompt


@dataclass(frozen=True)
class Form:
    """How an endpoint writes its answers."""

    object: str
    chunk: str  # the `object` of a stream's events
    prefix: str  # of ids
    is_chat: bool


TEXT = Form("text_completion", "text_completion", "cmpl-", False)
CHAT = Form("chat.completion", "chat.completion.chunk", "chatcmpl-", True)


class Answer:
    """A request that the engine works on."""

    def __init__(self, service: Service, search: SearchRequest, inputs: Inputs, work: Work, form: Form) -> None:
        """Submit the request, on the event loop; Refusal if that is impossible."""
        self._service, self._search, self._inputs, self._work = service, search, inputs, work
        work.inputs = len(inputs.tokens)
        options = dict(search.options)
        if "max_new_tokens" not in options and (most := service.default_new_tokens(inputs.tokens)) is not None:
            options["max_new_tokens"] = most
        self._request, self._events = service.submit(
            inputs.tokens,
            options,
            seed=search.seed,
            seconds=search.seconds,
            streams=search.stream or search.stops_early,
            stop=search.stop if search.options["num_beams"] > 1 else (),  # samples are cut when they are finished
            names=inputs.names,
        )
        count = len(inputs.tokens) * search.n
        self._texts = [GrowingText(search.stop, cleans_up=service.cleans_up) for _ in range(count)]
        self._counts: list[int | None] = [None] * count  # of the new tokens of choices that have ended
        self._contexts: list[list[int]] = []  # the last tokens of each prompt, if the text goes on there
        self._bases: list[str] = []  # the texts of the contexts
        self._prefixes = [inputs.prefixes[i // search.n] if inputs.prefixes else "" for i in range(count)]
        self._logprobs: list[Logprobs] = []  # of the choices, if asked for
        if (top := search.logprobs) is not None:
            asked = {"is_chat": form.is_chat, "echoes": bool(inputs.prefixes)}
            self._logprobs = [Logprobs(service, self._request, i // search.n, top, **asked) for i in range(count)]

    @property
    def seed(self) -> int | None:
        """The seed of the samples; None for other searches."""
        return self._request.seed if self._request.config.do_sample else None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self._inputs.tokens))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the choices' texts as they grow; closing it frees the rows."""
        try:
            if self._inputs.goes_on:
                found = await asyncio.to_thread(lambda: [self._context_of(row) for row in self._inputs.tokens])
                self._contexts, self._bases = [list(some) for some in zip(*found, strict=True)]
            async for event in self._service.events_of(self._request, self._events):
                if isinstance(event, Finished):
                    pieces = await asyncio.to_thread(self._finished, event)
                elif isinstance(event, Grown) and event.which in self._request.left:
                    pieces = await asyncio.to_thread(self._grown, event)
                    self._complete(event.which)
                else:
                    continue
                for piece in pieces:
                    self._work.tokens += piece.tokens
                    yield await self._with_logprobs(piece)
        finally:
            self.release()

    def release(self) -> None:
        """Free the rows of inputs that have not ended: nobody waits for them."""
        if self._request.left:
            self._service.engine.cancel(self._request)

    def _grown(self, event: Grown) -> list[Piece]:
        """What has become of an input's samples, or of the best of beams; none of those that have ended before."""
        pieces = []
        for index, row, text, score in self._open(event.which, event.rows, event.scores):
            has_ended, growing = score is not None, self._texts[index]  # one of beams ends with the search
            new, is_stopped = growing.end(text) if has_ended else growing.grow(text)
            if has_ended or is_stopped:
                pieces.append(self._last(index, row, new, score, is_stopped=is_stopped))
                continue
            piece = Piece(index, self._prefix(index) + new)
            if piece.text and self._logprobs and self._search.stream:
                piece = piece._replace(row=row[: self._tokens_of(growing.sent, event.which, row)])
            pieces.append(piece)
        return pieces

    def _complete(self, which: int) -> None:
        """If all choices of an input have ended, at a stop string or by themselves, the engine need not go on."""
        counts = self._counts[which * self._search.n :][: self._search.n]
        tokens = [count + self._begun for count in counts if count is not None]
        if len(tokens) == len(counts) and self._service.engine.complete(self._request, which, tokens):
            self._events.put(Finished(which, Hypotheses([], [])))

    def _finished(self, event: Finished) -> list[Piece]:
        """The last pieces of an input's choices that have not ended before, best first."""
        rows, scores = self._search.best(event.found, lambda row: self._end(row)[1])
        pieces = []
        for index, row, text, score in self._open(event.which, rows, scores):
            new, is_stopped = self._texts[index].end(text)
            pieces.append(self._last(index, row, new, score, is_stopped=is_stopped))
        return pieces

    def _open(
        self, which: int, rows: Sequence[list[int]], scores: Sequence[float | None]
    ) -> list[tuple[int, list[int], str, float | None]]:
        """Of the choices that have not ended: the index, the row, its text, and the score."""
        first = which * self._search.n
        left = [i for i in range(len(rows)) if self._counts[first + i] is None]
        texts = self._decoded(which, [rows[i] for i in left]) if left else []
        return [(first + i, rows[i], text, scores[i]) for i, text in zip(left, texts, strict=True)]

    def _last(self, index: int, row: list[int], new: str, score: float | None, *, is_stopped: bool) -> Piece:
        """The last piece of a choice, with this text."""
        if is_stopped:
            reason = "stop"
            count = self._tokens_until(index // self._search.n, row, self._has_stop) - self._begun
            if self._search.stops_early:
                score = None  # the engine may not have got to the end, which the score is of
            kept = row[: self._begun + count]
        else:
            reason, count = self._end(row)
            kept = row[:-1] if len(row) > self._begun and row[-1] in self._ends else row
        self._counts[index] = count
        return Piece(index, self._prefix(index) + new, reason, count, finite(score), kept)

    async def _with_logprobs(self, piece: Piece) -> Piece:
        """The piece with the log-probabilities of the tokens in it, if they are asked for."""
        grows = piece.finish_reason is None
        if not self._logprobs or (grows and not (piece.text and self._search.stream)):
            return piece
        return piece._replace(logprobs=await self._logprobs[piece.choice].of(piece.row, grows=grows))

    def _prefix(self, index: int) -> str:
        """What a choice's text begins with, once."""
        prefix, self._prefixes[index] = self._prefixes[index], ""
        return prefix

    @property
    def _begun(self) -> int:
        """The number of tokens in a row that were not generated: the start token of a decoder with an encoder."""
        return 0 if self._service.continues else 1

    def _context_of(self, row: list[int]) -> tuple[list[int], str]:
        """The last tokens of a prompt, and their text, in which no character is cut: a token may be one byte."""
        for size in range(CONTEXT, CONTEXT + 4):  # a character has four bytes at most
            (text,) = self._service.decoded([row[-size:]])
            if not text.startswith(INCOMPLETE):
                break
        return row[-size:], text

    def _end(self, row: list[int]) -> tuple[str, int]:
        """Why a row ends, and the number of new tokens, an end token among them that was cut off as padding."""
        config, ends = self._request.config, self._ends
        count = len(row) - self._begun
        if count > 0 and row[-1] in ends:
            # The host forces the last token of all to be this one, whatever the model would have said.
            is_forced = config.forced_eos_token_id is not None and count >= int(config.max_new_tokens)
            return "length" if is_forced else "stop", count
        if count >= int(config.max_new_tokens):
            return "length", count
        return "stop", count + (config.pad_token_id in ends)

    @property
    def _ends(self) -> list[int | None]:
        """The end tokens."""
        ends = self._request.config.eos_token_id
        return list(ends) if isinstance(ends, list) else [ends]

    def _has_stop(self, text: str) -> bool:
        return stop_in(text, self._search.stop) is not None

    def _tokens_until(self, which: int, row: list[int], has: Callable[[str], bool]) -> int:
        """The number of tokens of `row` with which the text first has what the whole text has."""

        def is_enough(tokens: list[int]) -> bool:
            (text,) = self._decoded(which, [tokens])
            return has(text.rstrip(INCOMPLETE))

        return tokens_until(row, is_enough)

    def _tokens_of(self, sent: int, which: int, row: list[int]) -> int:
        """The number of tokens of `row` in the first `sent` characters."""
        return self._tokens_until(which, row, lambda text: len(text) >= sent) if sent else self._begun

    def _decoded(self, which: int, rows: list[list[int]]) -> list[str]:
        """The text of each row, as it goes on from the prompt of this input."""
        if not self._bases or self._bases[which].endswith(INCOMPLETE):
            return self._service.decoded(rows)
        context, base = self._contexts[which], self._bases[which]
        return [text[len(base) :] for text in self._service.decoded([[*context, *row] for row in rows])]


def _usage(answer: Answer, tokens: int) -> dict[str, int]:
    prompt = answer.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _head(form: Form, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{form.prefix}{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def whole(answer: Answer, form: Form, model: str) -> dict[str, Any]:
    """The answer in one object."""
    texts: dict[int, str] = {}
    last: dict[int, Piece] = {}
    async for piece in answer.pieces():
        texts[piece.choice] = texts.get(piece.choice, "") + piece.text
        if piece.finish_reason is not None:
            last[piece.choice] = piece
    choices = []
    for index in sorted(last):
        content: dict[str, Any] = {"text": texts[index]}
        if form.is_chat:
            content = {"message": {"role": "assistant", "content": texts[index]}}
        end = {"finish_reason": last[index].finish_reason, "score": last[index].score}
        choices.append({"index": index, **content, **end, "logprobs": last[index].logprobs})
    usage = _usage(answer, sum(piece.tokens for piece in last.values()))
    return {**_head(form, form.object, model), "choices": choices, "usage": usage, "seed": answer.seed}


async def streamed(
    service: Service, answer: Answer, form: Form, model: str, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events, of which the first is empty; closing it frees the rows."""
    service.running += 1
    head, tokens, begun = _head(form, form.chunk, model), 0, set[int]()
    if include_usage:
        head["usage"] = None
    pieces = answer.pieces()
    try:
        yield ""
        async for piece in pieces:
            tokens += piece.tokens
            for choice in _chunks(piece, form, piece.choice not in begun):
                yield _event({**head, "choices": [choice]})
                begun.add(piece.choice)
        if include_usage:
            yield _event({**head, "choices": [], "usage": _usage(answer, tokens)})
    except Refusal as refusal:  # too late for a status
        yield _event(problem(status_of(refusal.status), refusal.message, refusal.field, refusal.code))
    finally:
        service.running -= 1
        answer.release()  # closing `pieces` would not, if they have not begun
        await pieces.aclose()
    yield "data: [DONE]\n\n"


def _chunks(piece: Piece, form: Form, is_first: bool) -> Sequence[dict[str, Any]]:
    """The choices of the events for a piece: none if it says nothing."""
    end: dict[str, Any] = {"logprobs": piece.logprobs, "finish_reason": piece.finish_reason}
    if piece.finish_reason is not None:
        end["score"] = piece.score
    if not form.is_chat:
        return [{"index": piece.choice, "text": piece.text, **end}] if piece.text or piece.finish_reason else []
    found: list[dict[str, Any]] = []
    open_end = {"logprobs": None, "finish_reason": None}
    if is_first:
        found.append({"index": piece.choice, "delta": {"role": "assistant", "content": ""}, **open_end})
    if piece.text:
        found.append({"index": piece.choice, "delta": {"content": piece.text}, **open_end, "logprobs": piece.logprobs})
        end["logprobs"] = None
    if piece.finish_reason is not None:
        found.append({"index": piece.choice, "delta": {}, **end})
    return found


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
