"""The fields of requests for what is said in a file, OpenAI's own and ours, and the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from fastgen.serving.limits import Limits

FORMATS = Literal["json", "text", "srt", "verbose_json", "vtt"]
LISTS = ("timestamp_granularities",)  # fields that may be there several times, with [] behind the name or not
# Fields of OpenAI's that are not offered, with the values that change nothing.
NEUTRAL: dict[str, tuple[str, ...]] = {
    "chunking_strategy": (),
    "include": (),
    "keywords": (),
    "known_speaker_names": (),
    "known_speaker_references": (),
    "languages": (),
    "stream": ("false", "False", "0"),
}
# What a format without JSON is answered with, for the page.
TEXTS: dict[str, Any] = {"description": "what is said", "content": {"text/plain": {"schema": {"type": "string"}}}}
_LONGEST_PROMPT = 10_000  # characters: Whisper reads the last 223 tokens


class Duration(BaseModel):
    """What is counted."""

    type: Literal["duration"] = "duration"
    seconds: int = Field(description="of sound, a part of one counted as one")


class SpeechText(BaseModel):
    """What is said."""

    text: str
    usage: Duration


class SpeechSegment(BaseModel):
    """What is said between two times; null is what the pipeline does not tell."""

    id: int
    start: float
    end: float
    text: str
    temperature: float
    seek: int | None = None
    tokens: list[int] | None = None
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


class SpeechWord(BaseModel):
    """A word, and when it is said."""

    word: str
    start: float
    end: float


class SpeechVerbose(SpeechText):
    """What is said, with times."""

    task: Literal["transcribe", "translate"]
    language: str | None = Field(description="the name of the text's language")
    duration: float
    segments: list[SpeechSegment] | None = None
    words: list[SpeechWord] | None = None


def fields(limits: Limits) -> type[BaseModel]:
    """The class of a form's fields; values are texts, as forms have them."""
    beams = Annotated[int, Field(ge=1, le=limits.beams)]
    granularities = Annotated[list[Literal["word", "segment"]], Field(max_length=10)]
    found: dict[str, Any] = {
        "model": (str | None, Field(None, description="if given, the name that /v1/models has")),
        "language": (
            Annotated[str, Field(max_length=40)] | None,
            Field(None, description="that is spoken, such as en; by default found out"),
        ),
        "prompt": (
            Annotated[str, Field(max_length=_LONGEST_PROMPT)] | None,
            Field(None, description="what was said before, or names that will be said"),
        ),
        "response_format": (FORMATS, Field("json")),
        "temperature": (
            Annotated[float, Field(ge=0.0, le=1.0)],
            Field(0.0, description="0: greedy or beam search; above, tokens are drawn"),
        ),
        "timestamp_granularities": (granularities | None, Field(None, description="for verbose_json")),
        "num_beams": (beams | None, Field(None, description="by default what the pipeline of transformers has")),
        "seed": (Annotated[int, Field(ge=0, lt=2**63)] | None, Field(None, description="of drawing")),
        "timeout": (Annotated[float, Field(gt=0, le=limits.seconds)] | None, Field(None, description="in seconds")),
    }
    return create_model("SpeechRequest", __config__=ConfigDict(extra="forbid"), **found)


def form(kind: type[BaseModel]) -> dict[str, Any]:
    """The schema of a request with such fields, for the page: a form with a file."""
    schema = kind.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "sound, or a video, of any format that FFmpeg knows"}
    schema["properties"] = {"file": file, **schema["properties"]}
    schema["required"] = ["file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
