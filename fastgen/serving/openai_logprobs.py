"""Log-probabilities of a choice's tokens: computed in the engine's thread, and written as OpenAI's clients read."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from fastgen.pipeline.transformers.growing_text import INCOMPLETE
from fastgen.serving import failures, logprobs
from fastgen.serving.base_engine import EXPIRED, STOPPED
from fastgen.serving.generation_request import GenerationRequest, Stopped
from fastgen.serving.logprobs import Scored, Scorer
from fastgen.serving.service import Refusal, Service

_FEW, _MANY = 5, 20  # tokens: a character has at most four bytes


class Logprobs:
    """The log-probabilities of a choice, in the form of the endpoint, at once or part by part."""

    def __init__(
        self, service: Service, request: GenerationRequest, which: int, top: int, *, is_chat: bool, echoes: bool
    ) -> None:
        """Of a hypothesis for an input of this request; `echoes`: of the input's tokens, too."""
        source = request.inputs[which]
        self._service, self._request, self._is_chat = service, request, is_chat
        self._scorer = Scorer(source, top, whole=echoes)
        self._before = [*source] if service.continues and not echoes else []  # tokens before the next one
        self._places: _Places | None = None  # of the tokens in the text
        self._is_begun = False

    async def of(self, row: Sequence[int], *, grows: bool) -> dict[str, Any] | None:
        """Those of the tokens that are new since the last call; None if there are none. Refusal if it fails.

        Args:
            row: the hypothesis so far.
            grows: whether another call follows.
        """
        found = await self._scored(row, grows=grows)
        if not found and (grows or self._is_begun):
            return None
        self._is_begun = True
        if not self._before and not self._service.continues:
            self._before = [row[0]]
        write = self._as_content if self._is_chat else self._as_lists
        return await asyncio.to_thread(write, found)

    async def _scored(self, row: Sequence[int], *, grows: bool) -> list[Scored]:
        task = functools.partial(self._scorer, row=row, grows=grows)
        try:
            work = asyncio.wrap_future(self._service.engine.with_model(task))
            found = await asyncio.wait_for(work, max(self._request.deadline - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            raise Refusal(504, EXPIRED) from None
        except Stopped:
            raise Refusal(503, STOPPED) from None
        except Exception as error:  # raised by the model
            failed = failures.failed_by(error)
            raise Refusal(failed.status, failed.message) from error
        return cast("list[Scored]", found)

    def _as_lists(self, found: Sequence[Scored]) -> dict[str, Any]:
        if self._places is None:
            goes_on = self._service.continues and not self._service.cleans_up  # then a text is decoded with the prompt
            self._places = _Places(self._service.decoded, self._before if goes_on else [])
        offsets = [self._places.of(one.token) for one in found]
        written = self._written(found)
        return {
            "tokens": [texts[one.token] for one, texts in zip(found, written, strict=True)],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [_by_text(one, texts) for one, texts in zip(found, written, strict=True)],
            "text_offset": offsets,
        }

    def _as_content(self, found: Sequence[Scored]) -> dict[str, Any]:
        content = []
        for one, texts in zip(found, self._written(found), strict=True):
            top = [_token(texts[token], logprob) for token, logprob in one.top]
            content.append({**_token(texts[one.token], one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _written(self, found: Sequence[Scored]) -> list[dict[int, str]]:
        decode = functools.partial(self._service.decoded, special=True)
        before = self._before[:]
        self._before += [one.token for one in found]
        return logprobs.texts_of(decode, before, found, self._service.special_tokens)


class _Places:
    """Where tokens begin in a text, in characters: those of one character all begin where it does."""

    def __init__(self, decode: Callable[[list[list[int]]], list[str]], before: Sequence[int]) -> None:
        """`before`: tokens before the first one, whose text comes before this one."""
        self._decode = decode
        self._tokens = list(before[-_FEW:])  # the last ones, from the beginning of a character
        self._read = len(self._tokens)  # how many of them are whole characters
        self._text = self._decoded()  # of these
        self._place = 0

    def of(self, token: int) -> int:
        """The place of the next token."""
        place = self._place
        self._tokens.append(token)
        text = self._decoded()
        if text.endswith(INCOMPLETE) and len(self._tokens) - self._read < _FEW:  # perhaps a part of a character
            return place
        self._place += len(text) - len(self._text)
        self._text = text
        if len(self._tokens) > _MANY:
            self._tokens = self._tokens[self._read :]
            self._text = self._decoded()
        self._read = len(self._tokens)
        return place

    def _decoded(self) -> str:
        (text,) = self._decode([self._tokens])
        return text


def _by_text(one: Scored, texts: dict[int, str]) -> dict[str, float] | None:
    """The most likely tokens by text, the best of those that read alike, and the token's own."""
    if one.logprob is None:
        return None
    found = {texts[one.token]: one.logprob}
    for token, logprob in one.top:
        found[texts[token]] = max(logprob, found.get(texts[token], logprob))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    is_part = INCOMPLETE in text
    return {"token": text, "logprob": logprob, "bytes": None if is_part else list(text.encode())}
