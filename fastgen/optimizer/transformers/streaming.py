"""Lets `generate` take a streamer with beams: the host refuses it before it prepares the call.

Whether a call is accelerated is known only once the host has prepared it. Until then a `HeldStreamer` stands in for the
user's streamer, and keeps the prompt. A call that is not accelerated ends as in the host, by the host's own code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastgen.decoding import front
from fastgen.decoding.search import Hypotheses
from fastgen.optimizer import gate
from fastgen.optimizer.beam_streaming import BeamStreaming

if TYPE_CHECKING:
    from fastgen.optimizer.transformers.request import Request

VALIDATES = ("self", "generation_mode", "generation_config", "generation_mode_kwargs")
_BEAMS = ("beam_search", "beam_sample")  # values of the host's GenerationMode


class HeldStreamer:
    """Stands in for a user's streamer in a call that may have beams; passes everything on unless it holds."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self._refuse: Callable[[], None] | None = None
        self._prompt: Tensor | None = None

    def hold(self, refuse: Callable[[], None]) -> None:
        """Keep the prompt from now on; `refuse` says what the host says to such a call."""
        self._refuse = refuse

    def put(self, value: Any) -> None:
        if self._refuse is None:
            self.streamer.put(value)
        else:
            self._prompt = value

    def end(self) -> None:
        self.streamer.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streamer, name)

    def release(self, beams: int) -> None:
        """Pass on the prompt, of which the host has made one row per beam, as greedy search would: `[B, P]`."""
        prompt, self._prompt, self._refuse = self._prompt, None, None  # `_refuse` holds the model
        if prompt is not None:
            self.streamer.put(prompt[::beams])

    def refuse(self) -> None:
        """End the call as the host does; if the host does not end it, the streamer gets what the host gives it."""
        refuse, self._refuse = self._refuse, None
        assert refuse is not None
        refuse()
        self.release(1)


class BeamStream:
    """Passes what one request's search has decided on to the user's streamer."""

    def __init__(self, request: Request) -> None:
        assert request.held is not None
        self._held, self._beams, self._prompt = request.held, request.beams, request.input_ids.shape[1]
        put = self._held.streamer.put
        self._streaming = BeamStreaming(put, self._prompt, front.of_beam_search, request.scores_only_fall)

    def begin(self) -> None:
        self._held.release(self._beams)

    def follow(self, search: Any) -> None:
        """Pass on what a step has decided."""
        self._streaming.follow(search)

    def finish(self, found: Hypotheses) -> None:
        """Pass on the rest of each sentence's best hypothesis, and end the stream."""
        count = int((found.rows[:, 0] >= 0).sum(1).max())
        self._streaming.finish(found.tokens[:, 0, self._prompt : self._prompt + count])
        self._held.end()


def why_not_streamed(request: Request, decision: gate.Decision) -> str | None:
    """Why this request, which has a streamer with beams, is refused as in stock; None if it is not, or has none."""
    if request.held is None or decision.tier == gate.FAST:
        return None
    if decision.reason is not None:
        return decision.reason
    return "a streamer with beams needs fastgen's own loop: tier='compat' is configured"


def refused(request: Request) -> Request:
    """A request with a streamer that is not accelerated, as the host runs it.

    Raises ValueError, the host's own, where the host takes no streamer with beams.
    """
    assert request.held is not None
    request.held.refuse()
    return dataclasses.replace(request, model_kwargs={**request.model_kwargs, "streamer": request.held.streamer})


def streamer_held(
    generate: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the host's `generate`, with a HeldStreamer for the streamer of a call that may have beams.

    A model with a `generate` of its own may decode several times, or change what it returns: it keeps the streamer.
    """
    place = _place(generate)
    streamer = args[place] if len(args) > place else kwargs.get("streamer")
    if streamer is None or isinstance(streamer, HeldStreamer) or kwargs.get("custom_generate") is not None:
        return args, kwargs
    if getattr(getattr(type(model), "generate", None), "__wrapped__", None) is not generate:
        return args, kwargs
    configs = (args[1] if len(args) > 1 else kwargs.get("generation_config"), getattr(model, "generation_config", None))
    counts = [kwargs.get("num_beams"), *(getattr(config, "num_beams", None) for config in configs)]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        return args, kwargs
    if len(args) > place:
        return (*args[:place], HeldStreamer(streamer), *args[place + 1 :]), kwargs
    return args, {**kwargs, "streamer": HeldStreamer(streamer)}


@functools.cache
def _place(generate: Callable[..., Any]) -> int:
    """The place of the streamer among the positional arguments of `generate`, the model apart."""
    return list(inspect.signature(generate).parameters).index("streamer") - 1


def holding(validate: Callable[..., Any], mixin: type) -> Callable[..., Any]:
    """Wrap `validate`, the host's `_validate_generation_mode`, which refuses a streamer with beams, to put that off."""

    @functools.wraps(validate)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        streamer = generation_mode_kwargs.get("streamer")
        is_ours = getattr(type(self), "_beam_search", None) is vars(mixin).get("_beam_search")
        if not isinstance(streamer, HeldStreamer) or generation_mode.value not in _BEAMS or not is_ours:
            validate(self, generation_mode, generation_config, generation_mode_kwargs)
            return
        others = {name: value for name, value in generation_mode_kwargs.items() if name != "streamer"}
        validate(self, generation_mode, generation_config, others)
        asked = {**others, "streamer": streamer.streamer}
        streamer.hold(lambda: validate(self, generation_mode, generation_config, asked))

    return _validate_generation_mode
