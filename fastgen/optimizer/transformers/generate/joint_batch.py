"""The batches that calls of `generate`, which run in turn, share: each search enters one, and leaves when it is done.

The host's `generate` of some models calls several searches, one after the other, each with what the last one found:
Whisper's does so for each window of a long recording, and again at a higher temperature. So no call can be taken apart
beforehand: each runs in turn with others (see `fastgen.optimizer.together`) up to its next search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastgen import config
from fastgen.memory import limits
from fastgen.optimizer import gate, together
from fastgen.optimizer.transformers import verification, versions, word_times
from fastgen.optimizer.transformers.generate.continuous_batch import ContinuousBatch
from fastgen.optimizer.transformers.generate.suspended_call import Call, CallDecoder
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.support import unsupported_on_tree

# Models whose sentences may be at different positions, and whose decoder attends to all that the encoder has read,
# whatever the mask says: all sources are equally long.
_MODELS = frozenset({"whisper"})


def why_alone(request: Request) -> str | None:
    """Why this search does not share the steps of others; None if it does."""
    facts = request.facts
    if config.current().tier not in ("auto", "fast"):
        return "another tier is configured"
    if not versions.PREFILLS:
        return "calls of this version have not been tried together"
    if getattr(request.model.config, "model_type", None) not in _MODELS or not facts.is_tested:
        return f"{type(request.model).__name__} has not been tried with sentences at different positions"
    if facts.foreign or request.calls_back or request.streamer is not None:
        return "code of yours runs in between, and may see other rows"
    if request.generation_config.do_sample or request.diverse:
        return "it is neither beam search nor greedy search"
    if not request.stops_by_last_token:
        return "other calls would count for its time limit"
    return unsupported_on_tree(request, shares=True) or request.changed_rule


class JointCall(Call):
    """A search among others; what it raises ends its own call alone."""

    def __init__(self, request: Request, stock: Callable[..., Any]) -> None:
        super().__init__(-1)
        self.asked, self.request, self.stock = request, word_times.without_attentions(request), stock
        self.has_begun = False

    @property
    def key(self) -> Hashable:
        """Searches with equal keys may share a batch."""
        request = self.request
        states: Tensor = request.model_kwargs["encoder_outputs"][0]
        inputs = request.all_inputs, states.shape[1:], states.dtype
        return id(request.model), request.beams, request.is_beam_search, inputs

    @property
    def fails_alone(self) -> bool:
        return True

    @torch.no_grad()
    def enter(self, batch: ContinuousBatch, number: int) -> None:
        """Read the prompts, and take part in the batch's steps."""
        self.number, self.has_begun = number, True
        self.decoder = _Decoder(self.request, batch.planned.of(self.request, self.stock), None)
        self.begin()
        batch.enter(self)

    def close(self) -> None:
        """Free what the search holds, if it has not ended; there may be no decoder yet."""
        if not self.ended and hasattr(self, "decoder"):
            self.decoder.close()

    def returned(self) -> Any:
        """What the search returns, or raise what it has raised."""
        if self.error is not None:
            raise self.error
        verification.note(self.asked, gate.FAST)
        if self.asked is not self.request:
            word_times.note_source(self.result, self.request)
        return self.result


class _Decoder(CallDecoder):
    def padding(self) -> Tensor:
        states: Tensor = self.encoder_outputs.last_hidden_state
        return torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)

    def result_cache(self) -> Any:
        return None  # its keys lie among those of others; nobody who calls in turn is given a cache


class JointBatches:
    """Batches by what calls have to have in common; `close` them in the end."""

    def __init__(self, calls: int) -> None:
        """`calls`: the most that decode together."""
        self._calls = calls
        self._batches: dict[Hashable, ContinuousBatch] = {}
        self._live: dict[int, JointCall] = {}

    def run(self, request: Request, stock: Callable[..., Any], alone: Callable[..., Any]) -> Any:
        """See `joint_calls.Joint`."""
        if together.is_apart(request.input_ids.device):
            return alone(request, stock)
        call = JointCall(request, stock)
        if why_alone(call.request) is not None:
            return together.outside(alone, request, stock)
        together.need(call)
        return call.returned()

    @limits.relief()
    def answer(self, needs: Mapping[int, JointCall]) -> dict[int, JointCall]:
        """Run steps until some of the calls have ended; returns those."""
        try:
            for number, call in needs.items():
                self._admit(number, call)
            while not any(call.ended for call in self._live.values()):
                for batch in self._batches.values():
                    batch.step()
        except BaseException:
            self.close()  # what the calls shared is in no known state
            raise
        ended = {number: call for number, call in self._live.items() if call.ended}
        for number in ended:
            del self._live[number]
        return ended

    def _admit(self, number: int, call: JointCall) -> None:
        if call.has_begun:
            return
        batch = self._batches.get(call.key)
        if batch is None:
            self._close_idle()
            batch = ContinuousBatch(call.request.model, self._calls * call.request.batch, self._calls)
            self._batches[call.key] = batch
        if batch.has_room(call.request.batch):
            self._live[number] = call
            call.enter(batch, number)

    def _close_idle(self) -> None:
        """Let go of batches in which nobody is: the places that they have for keys and values take memory."""
        for key in [key for key, batch in self._batches.items() if not batch.calls]:
            self._batches.pop(key).close()

    def close(self) -> None:
        """Let go of all that is left."""
        for call in self._live.values():
            call.close()
        self._live.clear()
        while self._batches:
            self._batches.popitem()[1].close()
