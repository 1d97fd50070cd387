"""Turns the body of a request to OpenAI's endpoints into options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastgen.pipeline.transformers.hypotheses import Hypotheses
from fastgen.serving.limits import Limits
from fastgen.serving.openai_schema import NEUTRAL
from fastgen.serving.options import offered
from fastgen.serving.service import Refusal

_LEAST_TEMPERATURE = 0.01
_OF_SAMPLES = {"temperature", "top_k", "top_p"}  # which clients send with a temperature of 0, too
_HOSTS_TOP_K = 50  # of transformers, where a model says nothing: OpenAI's clients expect all tokens


@dataclass(frozen=True)
class SearchRequest:
    """What a body asks for."""

    options: dict[str, Any]  # fields of GenerationConfig
    n: int  # hypotheses that are returned for each input, of those that the search finds
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    seed: int | None
    seconds: float | None
    logprobs: int | None = None  # of the tokens, and of so many of the most likely ones in each place

    @property
    def stops_early(self) -> bool:
        """Whether the service reads along, and ends an input when a stop string has ended the text of each row."""
        return bool(self.stop) and self.options["num_beams"] == 1

    def best(self, found: Hypotheses, count: Callable[[list[int]], int]) -> Hypotheses:
        """The `n` best hypotheses; samples by log-probability per token, as OpenAI's service orders them.

        Args:
            count: the number of new tokens in a row.
        """
        pairs = list(zip(found.tokens, found.scores, strict=True))
        if self.options["do_sample"] and self.options["num_beams"] == 1 and self.n < len(pairs):
            mean = {
                i: -math.inf if score is None else score / max(1, count(row)) for i, (row, score) in enumerate(pairs)
            }
            pairs = [pairs[i] for i in sorted(mean, key=mean.__getitem__, reverse=True)]
        pairs = pairs[: self.n]
        return Hypotheses([row for row, _ in pairs], [score for _, score in pairs])


def search_of(body: Mapping[str, Any], own: Any, limits: Limits) -> SearchRequest:
    """Read a body whose fields have the right types; Refusal for what cannot be used together.

    Args:
        body: the fields that the client has set.
        own: the model's GenerationConfig.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_neutral(given)
    options = {name: given[name] for name in offered(limits).keys() - _OF_SAMPLES if name in given}
    if "min_tokens" in given:
        options["min_new_tokens"] = given["min_tokens"]
    if (length := _length(given)) is not None:
        options["max_new_tokens"] = length
    if given.get("logit_bias"):  # clients send {}, which the host refuses
        bias = [[[int(token)], value] for token, value in given["logit_bias"].items()]
        options["sequence_bias"] = [*options.get("sequence_bias", []), *bias]
    options |= _search(given, own)
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    chooses_samples = options["num_beams"] == 1 and options["num_return_sequences"] > given.get("n", 1)
    other = "stop" if stop else "stream" if given.get("stream") else None
    if chooses_samples and other is not None:
        what = f"best_of with {other} is for beams: ask for temperature 0, or leave out one of them."
        raise Refusal(422, what, "best_of")
    if "stream_options" in given and not given.get("stream"):
        raise Refusal(422, "stream_options is for streams: ask for stream, or leave it out.", "stream_options")
    return SearchRequest(
        options,
        given.get("n", 1),
        stop,
        bool(given.get("stream")),
        bool((given.get("stream_options") or {}).get("include_usage")),
        given.get("seed"),
        given.get("timeout"),
        _logprobs(given),
    )


def _logprobs(given: Mapping[str, Any]) -> int | None:
    """The number of alternatives whose log-probabilities are asked for beside the tokens'; None if none are."""
    asked, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if asked is False:
        if top:
            raise Refusal(422, "top_logprobs is for logprobs: ask for that, or leave it out.", "top_logprobs")
        return None
    return int(top if asked is True else asked)


def _check_neutral(given: Mapping[str, Any]) -> None:
    """Refuse fields that are not offered, unless the value changes nothing."""
    for name, neutral in NEUTRAL.items():
        value = given.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise Refusal(422, f"{name} is not offered: leave it out.", name)


def _length(given: Mapping[str, Any]) -> int | None:
    lengths = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(set(lengths)) > 1:
        raise Refusal(422, "max_tokens and max_completion_tokens differ: send one of them.", "max_completion_tokens")
    return lengths[0] if lengths else None


def _search(given: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """The options that decide on the kind of search: greedy search, beams, samples, or samples of beams."""
    temperature, beams = given.get("temperature"), given.get("num_beams")
    n, best_of = given.get("n", 1), given.get("best_of")
    own_beams = int(own.num_beams or 1)
    if temperature and temperature < _LEAST_TEMPERATURE:
        raise Refusal(422, f"temperature should be 0, or at least {_LEAST_TEMPERATURE}.", "temperature")
    if best_of is not None and best_of < n:
        raise Refusal(422, f"best_of is {best_of}, and n is {n}: best_of should be at least n.", "best_of")
    if best_of is not None and beams is not None and best_of > beams:
        raise Refusal(422, f"best_of is {best_of}, and num_beams is {beams}: leave out one of them.", "best_of")
    do_sample = temperature > 0 if temperature is not None else (beams or own_beams) == 1
    if beams is None:
        default = 1 if do_sample or temperature is not None else own_beams
        beams = default if do_sample else best_of or default
    is_of_beams = beams > 1 or not do_sample
    if is_of_beams and n > beams:
        what = f"n is {n}, and the search has {beams} beam{'s' if beams > 1 else ''}"
        samples = "leave num_beams out" if do_sample else "ask for samples by a temperature above 0"
        raise Refusal(422, f"{what}: ask for num_beams of at least {n}, or {samples}.", "n")
    options = {"do_sample": do_sample, "num_beams": beams, "num_return_sequences": n if is_of_beams else best_of or n}
    if do_sample:
        options |= {name: given[name] for name in ("temperature", "top_p") if name in given}
        top_k = given.get("top_k", 0 if own.top_k in (None, _HOSTS_TOP_K) else own.top_k)
        options["top_k"] = max(0, top_k)
    return options
