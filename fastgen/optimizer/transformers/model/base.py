"""What the loops need of a decoder, whatever it keeps its cache in."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from fastgen import phases
from fastgen.decoding.search import Search
from fastgen.decoding.static_beam_search import StaticBeamSearch
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache.prefixes import Prefixes
from fastgen.optimizer.transformers.expansion import containers_copied, copied
from fastgen.optimizer.transformers.request import Request
from fastgen.replay.replayer import Replayer

NOT_ROWS = (versions.CACHE, "cache_position")  # inputs of the host that do not have one row per beam


class Decoder(abc.ABC):
    """Runs a request's model: reads the prompt at one row per sentence, then decodes step by step."""

    cache: Any  # what the model gets for the host's cache
    replayer: Replayer | None = None  # replays the steps
    search: tuple[Hashable, StaticBeamSearch] | None = None  # with a key of what it can be used for
    has_begun = False  # the prompt has been read
    prefixes: Prefixes | None = None  # where to keep the prompts, once they are read

    def __init__(self, request: Request, batch: int) -> None:
        self.model, self.beams = request.model, request.beams
        self.is_encoder_decoder = bool(self.model.config.is_encoder_decoder)
        self._batch_at_first = batch
        self._expanded, self._unexpanded_inputs = dict(request.model_kwargs), request.unexpanded

    @property
    @abc.abstractmethod
    def buffers(self) -> Buffers:
        """Where the loop takes large tensors from."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """How many steps have been run, the prompt's forward pass apart."""

    @phases.marked(phases.CACHE)
    def shared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The host's inputs for the prompt, with the expansion to beams undone and with this decoder's cache."""
        inputs = {name: self._once(name, value) for name, value in inputs.items()}
        inputs[versions.CACHE] = self.cache
        return inputs

    def _once(self, name: str, value: Any) -> Any:
        """An input of the prompt with one row per sentence."""
        if name in NOT_ROWS:
            return value
        if name in self._unexpanded_inputs and value is self._expanded.get(name):
            before = self._unexpanded_inputs[name]  # the user's own, which expanding would have copied
            return copied(before) if self.beams > 1 else containers_copied(before)
        if three_dimensions(name, value):
            return value[:, :: self.beams].contiguous()
        return self._unexpanded(value)

    def _unexpanded(self, value: Any) -> Any:
        """Undo the host's expansion of a tensor, or of a dict of tensors in place.

        In place because the host expanded it in place: so the copies are freed, and encoder outputs that the
        user passed are restored.
        """
        if isinstance(value, dict):
            for name, item in list(value.items()):
                value[name] = self._unexpanded(item)
            return value
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == self._batch_at_first * self.beams:
            return value[:: self.beams].contiguous()
        return value

    @abc.abstractmethod
    def reading(self, inputs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the forward pass of the prompt runs on these inputs."""

    @abc.abstractmethod
    def begin_decoding(self, inputs: dict[str, Any], outputs: Any) -> None:
        """Begin decoding, once the prompt is in the cache; `inputs`: the prompt's, from `shared`; `outputs`: what the
        model made of them, logits `[B, P', V]` among them."""

    def prompt_tokens(self) -> int:
        """How many tokens of the prompt are in the cache, before the first step."""
        return int(self.cache.get_seq_length())

    def step(self, inputs: dict[str, Any]) -> Any:
        """Run the model on the host's inputs of one step, one row per beam."""
        return self.run(self.model, {**inputs, "return_dict": True})

    @abc.abstractmethod
    def run(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Run one step by the model's `forward`. The next step may overwrite the result of a replayed one."""

    @abc.abstractmethod
    def reorder(self, parents: Tensor) -> None:
        """Beam `(b, m)` continues row `parents[b*M + m]`, int64 `[B*M]`."""

    @abc.abstractmethod
    def leaving(self, search: Search) -> Tensor | None:
        """Which sentences to evict now, bool `[B]`; None if it does not pay yet."""

    @abc.abstractmethod
    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these, int64 `[B']`."""

    def ended(self, search: Search | None) -> None:
        """Called when the loop is done, before the result gets a cache; `search`: our loop's, None in the host's."""
        return

    @abc.abstractmethod
    def result_cache(self) -> Any:
        """The cache that the host would have returned."""

    def store_graph(self) -> None:
        """Keep the captured steps of this call, which has succeeded, for later calls."""
        return

    @abc.abstractmethod
    def cache_bytes(self) -> int:
        """The most bytes that the caches of self-attention and cross-attention have taken."""

    @abc.abstractmethod
    def cache_kind(self) -> str:
        """What was stored for each position, in one word."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free all keys and values, except those that the result refers to."""


def three_dimensions(name: str, value: Any) -> bool:
    """Whether an input is positions in images: `[3, rows, P]`, with a fourth for text in newer models."""
    return name == "position_ids" and isinstance(value, Tensor) and value.ndim == 3


@phases.marked(phases.CACHE)
def selected(value: Any, rows: Tensor, of: int) -> Any:
    """These rows of a tensor with `of` rows, or of a dict of such tensors; anything else as it is."""
    if isinstance(value, dict):
        return type(value)(**{name: selected(item, rows, of) for name, item in value.items()})
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == of:
        return value.index_select(0, rows.to(value.device))
    return value


def selected_inputs(inputs: dict[str, Any], index: Tensor, of: int) -> dict[str, Any]:
    """These rows, int64 `[rows']`, of the host's inputs, which have one row per beam, `of` in all."""

    def rows_of(name: str, value: Any) -> Any:
        if name in NOT_ROWS:
            return value
        if three_dimensions(name, value):
            return value.index_select(1, index.to(value.device))
        return selected(value, index, of)

    return {name: rows_of(name, value) for name, value in inputs.items()}
