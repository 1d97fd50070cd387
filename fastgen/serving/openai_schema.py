"""The fields of requests to OpenAI's endpoints: OpenAI's own, and the search's options beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr, create_model

from fastgen.serving.limits import Limits
from fastgen.serving.options import MOST_FIELDS, VALIDATORS, of_any_search, offered, with_few_fields

MOST_STOPS, LONGEST_STOP = 4, 200
MOST_LOGPROBS = 20
# Options of the search that have another name or another range here.
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
_REPLACED = {*RENAMED, "do_sample", "temperature", "top_k"}
# Fields of OpenAI's that say nothing about the text: taken, and left unread.
_UNREAD = (
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store user"
).split()
# Fields of OpenAI's that are not offered, with the values that change nothing, which clients send all the same.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_ONLY_COMPLETIONS = ("suffix",)
_ONLY_CHAT = """audio function_call functions modalities prediction reasoning_effort response_format tool_choice tools
    verbosity web_search_options""".split()

_STOP = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_BIAS = Annotated[float, Field(ge=-100.0, le=100.0)]
_TOKEN = Annotated[StrictInt, Field(ge=0, lt=2**31)]
_FEW = BeforeValidator(with_few_fields)


class StreamOptions(BaseModel):
    """What a stream has besides the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool | None = Field(None, description="end with a chunk that has the numbers of tokens")
    include_obfuscation: StrictBool | None = Field(None, description="not read: chunks have no padding")


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: StrictStr = ""


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)]

    def as_text(self) -> dict[str, Any]:
        """The message as chat templates read it; models know a developer's messages as the system's."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}

    def not_offered(self) -> str | None:
        """The first field that has a value and is not offered; None if there is none."""
        given = (name for name, value in (self.model_extra or {}).items() if value not in (None, [], ""))
        return next((name for name in given if name not in ("name", "refusal")), None)


class Usage(BaseModel):
    """Numbers of tokens: of the prompts, and of the choices, their end tokens among them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(BaseModel):
    """The tokens of a text, and the model's log-probabilities of them: see `logprobs` of the request."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a token that nothing comes before")
    top_logprobs: list[dict[str, float] | None] = Field(description="of the most likely tokens, and the token's own")
    text_offset: list[int] = Field(description="where each token begins in the text")


class TopLogprob(BaseModel):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="null for a part of a character")


class ChatLogprob(TopLogprob):
    """A token of a message, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a message, with the model's log-probabilities."""

    content: list[ChatLogprob]
    refusal: None = None


class TextChoice(BaseModel):
    """A text."""

    index: int = Field(description="of the prompt times n, plus the number among its texts, best first")
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None = None
    score: float | None = Field(
        description="as /v1/generate has it; without beams, none where a stop string ended the text"
    )


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    seed: int | None = Field(description="of the samples")


class ChatMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """A message."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None = None
    score: float | None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int | None


class ErrorOfOpenAI(BaseModel):
    """Why there is no answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemOfOpenAI(BaseModel):
    """An error."""

    error: ErrorOfOpenAI


class Model(BaseModel):
    """A model that the service has."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fastgen"


class Models(BaseModel):
    """The models that the service has: one."""

    object: Literal["list"] = "list"
    data: list[Model]


def completion(limits: Limits) -> type[BaseModel]:
    """The class of a body for /v1/completions."""
    text = Annotated[str, Field(min_length=1, max_length=limits.body_bytes)]
    tokens = Annotated[list[_TOKEN], Field(min_length=1, max_length=limits.body_bytes, fail_fast=True)]
    several = Field(min_length=1, max_length=limits.inputs, fail_fast=True)
    prompt: Any = text | Annotated[list[text], several] | tokens | Annotated[list[tokens], several]
    return create_model(
        "CompletionRequest",
        __config__=_config({"prompt": "order 4213", "num_beams": min(4, limits.beams)}, limits),
        __validators__=VALIDATORS,
        prompt=(prompt, Field(description="a text, several, the tokens of one, or the tokens of several")),
        best_of=(_number(limits), Field(None, description="n of so many beams or samples are returned")),
        echo=(StrictBool | None, Field(None, description="begin each text with its prompt")),
        logprobs=(
            Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | Literal[False] | None,
            Field(None, description="tokens with log-probabilities, and so many of the most likely ones in each place"),
        ),
        **_common(limits, _ONLY_CHAT),
    )


def chat(limits: Limits) -> type[BaseModel]:
    """The class of a body for /v1/chat/completions."""
    return create_model(
        "ChatRequest",
        __config__=_config({"messages": [{"role": "user", "content": "order 4213"}]}, limits),
        __validators__=VALIDATORS,
        messages=(Annotated[list[Message], Field(min_length=1, max_length=1000, fail_fast=True)], ...),
        logprobs=(StrictBool | None, Field(None, description="tokens with log-probabilities")),
        top_logprobs=(
            Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None,
            Field(None, description="with logprobs: so many of the most likely tokens in each place"),
        ),
        **_common(limits, _ONLY_COMPLETIONS),
    )


def _config(example: dict[str, Any], limits: Limits) -> ConfigDict:
    return ConfigDict(
        extra="forbid", json_schema_extra={"example": {**example, "max_tokens": min(60, limits.new_tokens)}}
    )


def _number(limits: Limits) -> Any:
    return Annotated[StrictInt, Field(ge=1, le=limits.beams)] | None


def _common(limits: Limits, elsewhere: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """The fields of both endpoints; `elsewhere`: fields that only the other one has."""
    search = offered(limits)
    length = search["max_new_tokens"] | None
    ids = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
    fields: dict[str, Any] = {
        "model": (StrictStr | None, Field(None, description="if given, the name that /v1/models has")),
        "max_tokens": (length, Field(None, description="new tokens")),
        "max_completion_tokens": (length, Field(None, description="the same")),
        "min_tokens": (search["min_new_tokens"] | None, Field(None, description="new tokens, at the least")),
        "temperature": (
            Annotated[float, Field(ge=0.0, le=100.0)] | None,
            Field(None, description="0: greedy or beam search. Without it a search with beams is none of samples"),
        ),
        "top_k": (Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None, Field(None, description="0, -1: all tokens")),
        "n": (_number(limits), Field(None, description="texts for each input, best first")),
        "stop": (
            _STOP | Annotated[list[_STOP], Field(max_length=MOST_STOPS, fail_fast=True)] | None,
            Field(None, description="texts that end the output, which is without them"),
        ),
        "logit_bias": (
            Annotated[dict[ids, _BIAS], Field(max_length=MOST_FIELDS), _FEW] | None,
            Field(None, description="what is added to the logits of tokens"),
        ),
        "stream": (StrictBool | None, Field(None, description="server-sent events, then [DONE]")),
        "stream_options": (Annotated[StreamOptions, _FEW] | None, None),
        **of_any_search(limits),
        **{name: (kind | None, None) for name, kind in search.items() if name not in _REPLACED},
    }
    unread = dict.fromkeys(_UNREAD, (Any, Field(None, description="not read")))
    refused = {
        name: (Any, Field(None, description=f"not offered: {_shown(values)}"))
        for name, values in NEUTRAL.items()
        if name not in elsewhere
    }
    return {**fields, **unread, **refused}


def _shown(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, ("null", *values))) + " alone"
