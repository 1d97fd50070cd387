"""The tokens of one call of `generate`, one after the other, as they are decided: a generator over any host's call.

The call runs in a thread, and waits there until the next token is asked for. So whoever leaves the generator, by an
exception or for good, ends the call where it stands.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer import beam_streaming
from fastgen.optimizer.suspending import Stopped, Suspendable
from fastgen.patching.foreign_code import active_mode


def stream(model: Any, args: Sequence[Any], inputs: Mapping[str, Any]) -> Generator[int, None, Any]:
    """See `fastgen.stream`."""
    if (mode := active_mode()) is not None:
        raise ValueError(
            f"fastgen.stream runs in a thread of its own, where your mode ({mode}) is not: leave the mode."
        )
    if "streamer" in inputs:
        raise ValueError("streamer: fastgen.stream has a streamer of its own; call generate to use yours.")
    if not callable(getattr(model, "generate", None)):
        raise ValueError(f"fastgen.stream needs a model, or generator, with a method generate: {type(model).__name__}.")
    is_fairseq = isinstance(model, _classes_of_fairseq())
    return _running(_fairseq if is_fairseq else _transformers, model, args, dict(inputs))


def stream_search(search: Callable[[], Any]) -> Generator[int, None, Any]:
    """As `fastgen.stream`: the tokens of any call that runs one of fairseq's searches, such as a task's."""
    return _running(lambda ask, *_: _listened(ask, search), None, (), {})


def _classes_of_fairseq() -> tuple[type, ...]:
    """The generator and the hub interfaces, if fairseq has been imported."""
    places = {"fairseq.sequence_generator": "SequenceGenerator", "fairseq.hub_utils": "GeneratorHubInterface"}
    return tuple(getattr(sys.modules[home], name) for home, name in places.items() if home in sys.modules)


def _running(
    call: Callable[..., Any], model: Any, args: Sequence[Any], inputs: dict[str, Any]
) -> Generator[int, None, Any]:
    contexts = _autocast()

    def run() -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return call(suspendable.ask, model, args, inputs)

    suspendable = Suspendable(run)
    with contextlib.closing(suspendable):
        while True:
            try:
                token = suspendable.resume()
            except Stopped as stopped:
                raise RuntimeError(f"The call raised StopIteration: {stopped.error!r}") from stopped.error
            if suspendable.ended:
                return suspendable.result
            yield token


def _autocast() -> list[Any]:
    """What sets autocast as it is in this thread."""
    return [
        torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]


class Streamer:
    """A streamer of transformers' `generate` that passes on each token of one input, the prompt apart."""

    def __init__(self, ask: Callable[[int], Any], searches: bool) -> None:
        """`searches`: whether the call may run several searches, each with a prompt."""
        self._ask, self._is_prompt, self._searches = ask, True, searches

    def put(self, value: Tensor) -> None:
        """`value`: the prompt, int64 `[1, P]`, then tokens, `[n]`, or `[1, n]` in assisted decoding."""
        if self._is_prompt:
            self._is_prompt = False
            if value.ndim > 1 and len(value) > 1:
                what = "one input, one sample of it, and its beams in one group"
                raise ValueError(f"fastgen.stream takes {what}: this call has {len(value)} rows.")
            return
        if self._searches and value.ndim > 1:
            raise ValueError("fastgen.stream takes one input at a time: another search begins.")
        for token in value.flatten().tolist():
            self._ask(token)

    def end(self) -> None:
        """Nothing is kept that would have to be passed on."""


def _transformers(ask: Callable[[int], Any], model: Any, args: Sequence[Any], inputs: dict[str, Any]) -> Any:
    return model.generate(*args, **inputs, streamer=Streamer(ask, _has_own_generate(model)))


def _has_own_generate(model: Any) -> bool:
    """Whether the model's class has a `generate` of its own: Whisper's runs a search for each window."""
    module: Any = sys.modules.get("transformers.generation.utils")
    return module is None or getattr(type(model), "generate", None) is not module.GenerationMixin.generate


def _fairseq(ask: Callable[[int], Any], model: Any, args: Sequence[Any], inputs: dict[str, Any]) -> Any:
    return _listened(ask, lambda: model.generate(*args, **inputs))


def _listened(ask: Callable[[int], Any], search: Callable[[], Any]) -> Any:
    with (
        beam_streaming.listening(lambda column: ask(int(column[0]))) as listener,
        torch.no_grad(),
    ):  # fairseq's own tasks decode so
        result = search()
    if not listener.has_begun:
        raise ValueError("fastgen.stream needs fastgen's own beam search, and fastgen is disabled or has not run it.")
    return result
