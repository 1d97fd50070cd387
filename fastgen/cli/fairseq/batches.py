"""Stock's batches, or the same sentences in batches of automatic size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from fairseq.data.iterators import EpochBatchIterator

from fastgen.cli.fairseq.load import Loaded
from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.errors import InputError

AUTO_SENTENCES = 8
AUTO_TOKENS = 512


class Batches:
    """Stock's batches in stock's order; with `auto`, the name of the flag, the same sentences cut afresh."""

    def __init__(self, loaded: Loaded, auto: str | None = None) -> None:
        self._epoch = loaded.batches
        self._dataset = loaded.task.dataset(loaded.cfg.dataset.gen_subset)
        self._by_tokens = auto == "max_tokens"
        # A task may return an iterator of its own: its batches can't be counted, cut or collated again.
        self.plain = isinstance(self._epoch, EpochBatchIterator)
        if auto is not None and not self.plain:
            raise InputError(f"The task {loaded.cfg.task._name} makes its own batches: give --batch-size a number.")
        start = AUTO_TOKENS if self._by_tokens else AUTO_SENTENCES
        self.auto = None if auto is None else AutoBatch.on_device(loaded.device.type, start)
        self._ids: list[int] = []
        self.dropped = 0
        if self.plain:
            epoch = self._epoch
            shard = epoch.frozen_batches[epoch.shard_id :: epoch.num_shards]
            self._ids = [int(i) for batch in shard for i in batch]
            # fairseq leaves out the last sentences when their number is no multiple; equality goes first.
            if loaded.cfg.dataset.required_batch_size_multiple > 1:
                self.dropped = len(self._dataset) - sum(map(len, epoch.frozen_batches))
        self.sentences = len(self._ids) if self.plain else None

    def start(self, sentences_done: int, batches_done: int) -> Iterator[Any]:
        """What an earlier run left: numbered samples, or with automatic sizes the ids that `cut` takes."""
        if self.auto is None:
            return islice(enumerate(self._epoch.next_epoch_itr(shuffle=False)), batches_done, None)
        return iter([(batches_done, self._ids[sentences_done:])])

    def cut(self, rest: tuple[int, list[int]]) -> Iterator[tuple[int, Any]]:
        """Numbered samples, each of the size that is right when it is asked for."""
        number, ids = rest
        position = 0
        while position < len(ids):
            taken = self._take(ids, position)
            yield number, self.collate(taken)
            number, position = number + 1, position + len(taken)

    def _take(self, ids: Sequence[int], position: int) -> list[int]:
        """From `position`, as many as the size allows; never none."""
        assert self.auto is not None
        if not self._by_tokens:
            return list(ids[position : position + self.auto.size])
        taken: list[int] = []
        longest = 0
        for i in islice(ids, position, None):
            longest = max(longest, int(self._dataset.num_tokens(i)))
            if taken and longest * (len(taken) + 1) > self.auto.size:
                break
            taken.append(i)
        return taken

    def succeeded(self, ids: Sequence[int], speed: float) -> None:
        """A batch of these sentences was generated, at `speed`."""
        if self.auto is not None:
            self.auto.succeeded(self._units(ids), speed)

    def failed(self, ids: Sequence[int]) -> None:
        """A batch of these sentences ran out of memory."""
        if self.auto is not None:
            self.auto.failed(self._units(ids))

    def _units(self, ids: Sequence[int]) -> int:
        return max(int(self._dataset.num_tokens(i)) for i in ids) * len(ids) if self._by_tokens else len(ids)

    def collate(self, ids: Sequence[int]) -> Any:
        return self._epoch.collate_fn([self._dataset[i] for i in ids])
