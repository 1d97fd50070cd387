"""OpenAI's endpoints: text completions, conversations, and the list of models, for clients that speak to OpenAI."""

# No postponed annotations here: FastAPI could not look up the class of a body, which is made within a function.
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from fastgen.pipeline.transformers.tokenizing import Encode, EncodeChat
from fastgen.serving import metrics, openai_schema
from fastgen.serving.observed import work_of
from fastgen.serving.openai_answers import CHAT, TEXT, Answer, Form, Inputs, streamed, whole
from fastgen.serving.openai_schema import RENAMED
from fastgen.serving.openai_search import search_of
from fastgen.serving.options import STREAMS
from fastgen.serving.service import BaseService, Names, Refusal, Service
from fastgen.serving.services import check_model, of_texts

PROBLEMS = {
    400: "the body can't be read, or a field or a text can't be used",
    401: "without the bearer token",
    404: "another model",
    408: "the body took too long",
    413: "the body is too long",
    429: "the queue is full; Retry-After says when to try again",
    500: "the model failed",
    503: "out of memory, too many bodies at a time, or the service is stopping; Retry-After says when to try again",
    504: "it took longer than it may: another try would, too",
}


def add_endpoints(app: FastAPI, service: BaseService, dependencies: Sequence[Any]) -> None:
    """Add the endpoints to the application; `dependencies`: FastAPI's, of each of them."""
    started, name = int(time.time()), metrics.shown(service.name)
    models = openai_schema.Models(data=[openai_schema.Model(id=name, created=started)])
    CompletionRequest, ChatRequest = openai_schema.completion(service.limits), openai_schema.chat(service.limits)
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": openai_schema.ProblemOfOpenAI, "description": what} for code, what in PROBLEMS.items()
    }
    common: dict[str, Any] = {"dependencies": dependencies, "responses": problems}
    streaming: dict[str, Any] = {**common, "responses": {200: STREAMS, **problems}}

    async def answer(form: Form, body: Any, inputs_of: Callable[..., Awaitable[Inputs]], request: Request) -> Any:
        texts = of_texts(service)
        texts.check_open()
        texts.running += 1
        try:
            check_model(texts, body.model)
            return await begun(texts, form, body, await inputs_of(texts, body), request)
        finally:
            texts.running -= 1

    async def begun(service: Service, form: Form, body: Any, inputs: Inputs, request: Request) -> Any:
        search = search_of(body.model_dump(exclude_unset=True), service.own_generation_config, service.limits)
        found = Answer(service, search, inputs, work_of(request.scope), form)
        if not search.stream:
            return await whole(found, form, name)
        events = streamed(service, found, form, name, include_usage=search.include_usage)
        await anext(events)  # from here on, closing `events` frees the rows
        return StreamingResponse(events, media_type="text/event-stream")

    @app.post("/v1/completions", response_model=openai_schema.Completion, **streaming)
    async def completions(body: CompletionRequest, request: Request) -> Any:  # type: ignore[valid-type]
        """Go on with prompts or, with an encoder-decoder, answer them, as OpenAI's endpoint of this name does."""
        return await answer(TEXT, body, _prompts, request)

    @app.post("/v1/chat/completions", response_model=openai_schema.ChatCompletion, **streaming)
    async def chat_completions(body: ChatRequest, request: Request) -> Any:  # type: ignore[valid-type]
        """Answer a conversation, for models with a chat template, as OpenAI's endpoint of this name does."""
        return await answer(CHAT, body, _conversation, request)

    @app.get("/v1/models", response_model=openai_schema.Models, **common)
    async def list_models() -> Any:
        """The model of the service, in a list."""
        return models

    @app.get("/v1/models/{model:path}", response_model=openai_schema.Model, **common)
    async def retrieve_model(model: str) -> Any:
        """The model of the service, by the name."""
        check_model(service, model)
        return models.data[0]


async def _prompts(service: Service, body: Any) -> Inputs:
    """The inputs of a text completion: texts, or tokens."""
    prompt = body.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if is_one else list(prompt)
    names = Names(lambda index: "prompt" if is_one else f"prompt[{index}]", _renamed)
    if body.echo and not service.continues:
        raise Refusal(
            422, "echo is for models that go on with a prompt, and this one answers it: leave it out.", "echo"
        )
    if isinstance(prompts[0], str):
        tokens, prefixes = await service.tokens_of(Encode(prompts), names), prompts
    else:
        _check_vocabulary(service, prompts, names)
        service.check_tokens(prompts, names)
        tokens = prompts
        prefixes = await asyncio.to_thread(service.decoded, prompts) if body.echo else []
    return Inputs(tokens, names, prefixes if body.echo else [], service.continues and not service.cleans_up)


def _check_vocabulary(service: Service, prompts: list[list[int]], names: Names) -> None:
    for number, row in enumerate(prompts):
        for index, token in enumerate(row):
            if token >= service.vocabulary:
                place = f"{names.of_input(number)}[{index}]"
                raise Refusal(422, f"{place} is {token}: the model's tokens are 0 to {service.vocabulary - 1}.", place)


async def _conversation(service: Service, body: Any) -> Inputs:
    """The input of a conversation, as the model's chat template writes it."""
    if not service.has_chat_template:
        what = "The model has no chat template, which messages need: send a prompt to /v1/completions."
        raise Refusal(422, what, "messages", "no_chat_template")
    for index, message in enumerate(body.messages):
        if (field := message.not_offered()) is not None:
            place = f"messages[{index}].{field[:80]}"
            raise Refusal(422, f"{place} is not offered: leave it out.", place)
    names = Names(lambda index: "The conversation in messages", _renamed, "messages")
    tokens = await service.tokens_of(EncodeChat([message.as_text() for message in body.messages]), names)
    return Inputs(tokens, names)


def _renamed(option: str) -> str:
    return RENAMED.get(option, option)
