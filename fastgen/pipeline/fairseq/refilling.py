"""Keeps batches full: in a stretch of samples, sentences take the rows of finished ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from fastgen.memory.limits import is_out_of_memory
from fastgen.optimizer.fairseq.generate.continuous_batch import in_order
from fastgen.pipeline.batching import release_memory
from fastgen.pipeline.fairseq import lines
from fastgen.pipeline.fairseq.batches import Batches
from fastgen.pipeline.fairseq.generation import Done, Generation
from fastgen.pipeline.offline import STRETCH

Numbered = tuple[int, Any, "list[int] | None"]  # the arguments of a call of Generation


class Refilling:
    """Generates stretches of samples, with the batch kept full within each stretch."""

    def __init__(self, generation: Generation, batches: Batches, warn: Callable[[str], None]) -> None:
        self._generation, self._batches, self._warn = generation, batches, warn
        self._goes_on = True

    def stages(self, sentences_done: int, batches_done: int) -> tuple[Iterator[Any], Callable[[Any], Iterator[Any]]]:
        """The source and the `cut` for `run_stages`; `cut` yields results of `Generation`, from the given batch on."""
        if self._batches.auto is None:
            samples = self._batches.start(sentences_done, batches_done // STRETCH * STRETCH)
            return self._stretches(samples), self._generate
        rest = self._batches.start(sentences_done, batches_done)
        return rest, lambda part: chain.from_iterable(map(self._generate, self._stretches(self._batches.cut(part))))

    def _stretches(self, samples: Iterator[Numbered]) -> Iterator[list[Numbered]]:
        """The samples in order, in stretches; each alone as long as the batch size is not settled."""
        while stretch := list(islice(samples, STRETCH if self._batches.settled else 1)):
            yield stretch

    def _generate(self, stretch: Sequence[Numbered]) -> Iterator[tuple[lines.Batch, Done] | None]:
        """Yield the results of `Generation` for these samples, in order."""
        done = 0
        if self._goes_on and len(stretch) > 1:
            stretch = [numbered for numbered in stretch if "net_input" in numbered[1]]
            try:
                for generated in self._refilled(stretch):
                    yield generated
                    done += 1
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if done < len(stretch):
                release_memory()  # after the `except` block, as the traceback holds the tensors
                self._warn("out of memory while a batch was kept full: going on without refill")
                self._batches.failed(max((positions or [] for _, _, positions in stretch), key=len))
                self._goes_on = self._batches.auto is not None  # with a fixed size it would run out again
        for numbered in stretch[done:]:
            yield self._generation(*numbered)

    def _refilled(self, stretch: Sequence[Numbered]) -> Iterator[tuple[lines.Batch, Done]]:
        started = time.perf_counter()
        samples = [sample for _, sample, _ in stretch]
        for sample in samples:
            self._generation.check(sample)
        with contextlib.closing(in_order(self._generation.infer, samples)) as found:
            for (number, sample, _), hypotheses in zip(stretch, found, strict=True):
                seconds, started = time.perf_counter() - started, time.perf_counter()
                yield self._generation.generated(number, sample, hypotheses, seconds)
