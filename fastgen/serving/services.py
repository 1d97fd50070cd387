"""Which service a model gets: one that answers texts, or one that writes down speech."""

from __future__ import annotations

from fastgen.pipeline.transformers.load import load_config
from fastgen.pipeline.transformers.settings import ModelSettings
from fastgen.serving import metrics
from fastgen.serving.limits import Limits
from fastgen.serving.service import BaseService, Refusal, Service
from fastgen.serving.speech import SpeechService, check_settings


def service_of(settings: ModelSettings, limits: Limits, most_queued: int) -> BaseService:
    """A `SpeechService` for a Whisper, a `Service` for other models; InputError if the model can't be served."""
    return (SpeechService if _is_speech(settings) else Service)(settings, limits, most_queued)


def check(settings: ModelSettings) -> None:
    """Raise InputError for settings that are not for this kind of model, before anything is started."""
    if _is_speech(settings):
        check_settings(settings)


def path_of(settings: ModelSettings) -> str:
    """The endpoint that answers requests of this model."""
    return "/v1/audio/transcriptions" if _is_speech(settings) else "/v1/generate"


def _is_speech(settings: ModelSettings) -> bool:
    return bool(load_config(settings.model).model_type == "whisper")


def of_texts(service: BaseService) -> Service:
    """The service, for an endpoint that takes texts; Refusal if the model takes none."""
    if isinstance(service, Service):
        return service
    raise Refusal(
        422,
        "The model is a Whisper, which writes down speech: send a file to /v1/audio/transcriptions.",
        code="no_text",
    )


def of_speech(service: BaseService) -> SpeechService:
    """The service, for an endpoint that takes speech; Refusal if the model takes none."""
    if isinstance(service, SpeechService):
        return service
    raise Refusal(422, "The model is no Whisper, and takes no sound: send a text to /v1/completions.", code="no_sound")


def check_model(service: BaseService, asked: str | None) -> None:
    """Raise Refusal if a request asks for another model."""
    name = metrics.shown(service.name)
    if asked is not None and asked not in (name, service.name):
        what = f"The service has no model {asked[:80]!a}: it has {name!a}."
        raise Refusal(404, what, "model", "model_not_found")
