"""Log-probabilities of a choice's tokens: computed in the engine's thread, and written as OpenAI's clients read."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any, cast

from fastgen.serving import failures, logprobs
from fastgen.serving.base_engine import EXPIRED, STOPPED
from fastgen.serving.generation_request import GenerationRequest, Stopped
from fastgen.serving.logprobs import Scored
from fastgen.serving.service import Refusal, Service

_UNKNOWN = "\ufffd"


async def scored(
    service: Service, request: GenerationRequest, which: int, row: Sequence[int], top: int, *, whole: bool
) -> list[Scored]:
    """See `logprobs.scored`; of a hypothesis for an input of this request. Refusal if there is no answer."""
    task = functools.partial(logprobs.scored, source=request.inputs[which], row=row, top=top, whole=whole)
    try:
        work = asyncio.wrap_future(service.engine.with_model(task))
        found = await asyncio.wait_for(work, max(request.deadline - time.monotonic(), 0.0))
    except asyncio.TimeoutError:
        raise Refusal(504, EXPIRED) from None
    except Stopped:
        raise Refusal(503, STOPPED) from None
    except Exception as error:  # raised by the model
        failed = failures.failed_by(error)
        raise Refusal(failed.status, failed.message) from error
    return cast("list[Scored]", found)


def in_texts(service: Service, before: Sequence[int], found: Sequence[Scored]) -> dict[str, Any]:
    """The `logprobs` of a text; `before`: the tokens before the first one."""
    written = _written(service, before, found)
    offsets, place = [], 0
    for one, texts in zip(found, written, strict=True):
        offsets.append(place)
        place += 0 if one.token in service.special_tokens else len(texts[one.token])
    return {
        "tokens": [texts[one.token] for one, texts in zip(found, written, strict=True)],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_by_text(one, texts) for one, texts in zip(found, written, strict=True)],
        "text_offset": offsets,
    }


def in_chats(service: Service, before: Sequence[int], found: Sequence[Scored]) -> dict[str, Any]:
    """The `logprobs` of a message; `before`: the tokens before the first one."""
    content = []
    for one, texts in zip(found, _written(service, before, found), strict=True):
        top = [_token(texts[token], logprob) for token, logprob in one.top]
        content.append({**_token(texts[one.token], one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _written(service: Service, before: Sequence[int], found: Sequence[Scored]) -> list[dict[int, str]]:
    decode = functools.partial(service.decoded, special=True)
    return logprobs.texts_of(decode, before, found, service.special_tokens)


def _by_text(one: Scored, texts: dict[int, str]) -> dict[str, float] | None:
    """The most likely tokens by text, the best of those that read alike, and the token's own."""
    if one.logprob is None:
        return None
    found = {texts[one.token]: one.logprob}
    for token, logprob in one.top:
        found[texts[token]] = max(logprob, found.get(texts[token], logprob))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    is_part = _UNKNOWN in text
    return {"token": text, "logprob": logprob, "bytes": None if is_part else list(text.encode())}
