"""Runs a model over the host's own cache, one row per beam; only the prompt is read at one row per sentence.

It is for models that cannot run on the tree: attention of their own, recurrent states, other caches. From the second
step on the model sees what it sees in the host's loop, so that no property of its attention or its cache matters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.search import Search
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache.recurrent import rows_of
from fastgen.optimizer.transformers.expansion import containers_copied
from fastgen.optimizer.transformers.model.base import Decoder
from fastgen.optimizer.transformers.model.session import multiplying, multiplying_one_step
from fastgen.optimizer.transformers.request import Request

KIND = "rows"  # what was stored, in one word
# Evicting a finished sentence costs little here: every step copies the cache anyway, to reorder it.
_EVICT_FROM = 1 / 16  # of the live sentences have to have finished


class RowDecoder(Decoder):
    """Runs a request's model over the cache that the host has prepared for it."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, request.batch)
        self.cache = request.model_kwargs[versions.CACHE]
        self._buffers, self._products = Buffers(self.model), LinearDispatcher.configured()
        if request.calls_back or request.facts.is_interrupted:
            self._products.expect_edits()
        self._batch, self._steps, self._peak_bytes = request.batch, 0, 0
        self._device = request.input_ids.device

    @property
    def buffers(self) -> Buffers:
        return self._buffers

    @property
    def num_steps(self) -> int:
        return self._steps

    def _unexpanded(self, value: Any) -> Any:
        return super()._unexpanded(containers_copied(value))  # later steps read the expanded one

    @contextlib.contextmanager
    def reading(self, inputs: dict[str, Any]) -> Iterator[None]:
        with multiplying(self._products, self.model):
            yield

    def begin_decoding(self, inputs: dict[str, Any], outputs: Any) -> None:
        self.has_begun = True
        made = getattr(outputs, versions.CACHE, None)
        if hasattr(made, "reorder_cache"):  # some models put the host's into one of their own
            self.cache = made
        if self.beams > 1:
            self.reorder(torch.arange(self._batch, device=self._device).repeat_interleave(self.beams))

    @phases.marked(phases.PASS)
    def run(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        self._steps += 1
        with multiplying_one_step(self._products, self.model):
            return forward(**inputs)

    @phases.marked(phases.CACHE)
    def reorder(self, parents: Tensor) -> None:
        with arena.of(self.model):  # where the last step's blocks are free
            self.cache.reorder_cache(parents)

    def leaving(self, search: Search) -> Tensor | None:
        if search.num_finished() < max(1, _EVICT_FROM * self._batch):
            return None
        return search.finished_mask()

    def select(self, sentences: Tensor) -> None:
        self._measure()
        self._batch = len(sentences)
        self.reorder(rows_of(sentences, self.beams))

    def result_cache(self) -> Any:
        return self.cache

    def cache_bytes(self) -> int:
        self._measure()
        return self._peak_bytes

    def cache_kind(self) -> str:
        return KIND

    def close(self) -> None:
        arena.settle()

    def _measure(self) -> None:
        self._peak_bytes = max(self._peak_bytes, sum(map(_bytes_of, _layers(self.cache))))


def _layers(cache: Any) -> Iterator[Any]:
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        yield from getattr(part, "layers", ())


def _bytes_of(layer: Any) -> int:
    """Bytes of the tensors that a layer of a cache holds, in attributes or in dictionaries of its own."""
    held = list(vars(layer).values())
    held += [item for value in held if isinstance(value, dict) for item in value.values()]
    return sum(value.nbytes for value in held if isinstance(value, Tensor))
