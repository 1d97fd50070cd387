"""Makes the batches of a run: stock's batches, or the same sentences in batches of automatic size."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

from fairseq.data.iterators import EpochBatchIterator

from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.fairseq.load import Loaded

AUTO_SENTENCES = 8
AUTO_TOKENS = 512


class Batches:
    """Stock's batches in stock's order; with `auto`, the name of a flag, the same sentences in other batches."""

    def __init__(self, loaded: Loaded, auto: str | None = None) -> None:
        self._epoch = loaded.batches
        self._dataset = loaded.task.dataset(loaded.cfg.dataset.gen_subset)
        self._by_tokens = auto == "max_tokens"
        # A task may return another iterator, whose batches can't be counted, cut or collated again.
        self.plain = isinstance(self._epoch, EpochBatchIterator)
        if auto is not None and not self.plain:
            raise InputError(f"The task {loaded.cfg.task._name} makes its own batches: give --batch-size a number.")
        start = AUTO_TOKENS if self._by_tokens else AUTO_SENTENCES
        self.auto = None if auto is None else AutoBatch.on_device(loaded.device.type, start)
        # The other bound, which isn't automatic, holds, too.
        bounds = loaded.cfg.dataset
        self._most_sentences = _bound(bounds.batch_size)
        self._most_tokens = _bound(bounds.max_tokens)
        self._positions: list[list[int]] = []  # positions in the dataset, by batch of stock; ids may differ
        self.dropped = 0
        if self.plain:
            epoch = self._epoch
            shard = epoch.frozen_batches[epoch.shard_id :: epoch.num_shards]
            self._positions = [[int(i) for i in batch] for batch in shard]
            # fairseq leaves out the last sentences if their number is no multiple, and so do we.
            if loaded.cfg.dataset.required_batch_size_multiple > 1:
                self.dropped = len(self._dataset) - sum(map(len, epoch.frozen_batches))
        self.sentences = sum(map(len, self._positions)) if self.plain else None
        if self.sentences == 0:
            raise InputError(f"There is nothing to generate: {self._why_nothing(bounds)}.")

    def _why_nothing(self, bounds: Any) -> str:
        if not len(self._dataset):
            return f"the subset {bounds.gen_subset} is empty"
        if self.dropped == len(self._dataset):
            return (
                f"fairseq leaves out every sentence ({self.dropped}), too long or no multiple of "
                f"{bounds.required_batch_size_multiple}; --required-batch-size-multiple 1 keeps the latter"
            )
        return "no sentence is left for this shard or below the model's length"

    @property
    def settled(self) -> bool:
        """Whether the size of the batches will not grow any more."""
        return self.auto is None or self.auto.settled

    def start(self, sentences_done: int, batches_done: int) -> Iterator[Any]:
        """Yield the work that an earlier run left: numbered samples with the positions of their sentences or, with
        automatic sizes, one item with all positions, for `cut`.
        """
        if self.auto is None:
            # A shard may be filled up with empty batches, which have no positions.
            positions = chain(self._positions, repeat([])) if self.plain else repeat(None)
            samples = zip(count(), self._epoch.next_epoch_itr(shuffle=False), positions)
            return islice(samples, batches_done, None)
        rest = islice(chain.from_iterable(self._positions), sentences_done, None)
        return iter([(batches_done, list(rest))])

    def cut(self, rest: tuple[int, list[int]]) -> Iterator[tuple[int, Any, list[int]]]:
        """Yield what `start` yields for fixed sizes, each batch of the size that is right when it is asked for."""
        number, positions = rest
        done = 0
        while done < len(positions):
            taken = self._take(positions, done)
            yield number, self.collate(taken), taken
            number, done = number + 1, done + len(taken)

    def _take(self, positions: Sequence[int], done: int) -> list[int]:
        """The positions of the next batch: as many as the automatic size and the other bound allow, at least one."""
        assert self.auto is not None
        sentences, tokens = self._most_sentences, self._most_tokens
        if self._by_tokens:
            tokens = self.auto.size
        else:
            sentences = min(sentences, self.auto.size)
        taken: list[int] = []
        longest = 0
        for i in islice(positions, done, min(done + sentences, len(positions))):
            longest = max(longest, int(self._dataset.num_tokens(i)))
            if taken and longest * (len(taken) + 1) > tokens:
                break
            taken.append(i)
        return taken

    def succeeded(self, positions: Sequence[int], speed: float) -> None:
        """Note that a batch of these sentences was generated, at `speed`."""
        if self.auto is not None:
            self.auto.succeeded(self._units(positions), speed)

    def failed(self, positions: Sequence[int]) -> None:
        """Note that a batch of these sentences ran out of memory."""
        if self.auto is not None:
            self.auto.failed(self._units(positions))

    def _units(self, positions: Sequence[int]) -> int:
        if not self._by_tokens:
            return len(positions)
        return max(int(self._dataset.num_tokens(i)) for i in positions) * len(positions)

    def collate(self, positions: Sequence[int]) -> Any:
        return self._epoch.collate_fn([self._dataset[i] for i in positions])


def _bound(value: int | None) -> int:
    """A bound of fairseq as a number: no bound if it is None or not positive."""
    return sys.maxsize if value is None or value < 1 else value
