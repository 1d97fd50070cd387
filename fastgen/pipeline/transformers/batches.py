"""Makes batches of records of like length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.offline import STRETCH
from fastgen.pipeline.transformers import failures, tokenizing
from fastgen.pipeline.transformers.records import Record
from fastgen.pipeline.workers import WorkerPool

AUTO_SENTENCES = 4
AUTO_TOKENS = 256
WINDOW = 4096  # records that are sorted by length together
_ENCODED = 64  # records that a worker tokenises at once


@dataclass
class Batch:
    """Records that are generated in one call; those that can't be used only pass through."""

    records: list[Record]
    number: int  # the lowest index, which seeds the sampling
    size: int  # how many records decode together; the others wait for room


@dataclass
class Source:
    """Reads and tokenises windows of records in the reading thread; `cut` makes batches in the calling thread."""

    records: Iterator[Record]
    pool: WorkerPool
    limit: int | None  # most tokens of an input
    fixed: int  # the size of a batch without `auto`
    auto: AutoBatch | None
    by_tokens: bool  # sizes are padded tokens, not records
    policy: failures.Policy
    refill: bool = False
    finished: set[int] = field(default_factory=set)  # indices of records that an earlier run has done
    first: int = 0  # the record to begin with, a multiple of WINDOW

    def __iter__(self) -> Iterator[list[Record]]:
        records = islice(self.records, self.first, None)
        while window := list(islice(records, WINDOW)):
            self._encode(window)
            yield window

    def cut(self, window: list[Record]) -> Iterator[Batch]:
        """Cut a window into batches of records of like length, without records that an earlier run has done."""
        end, problem = next(
            ((place, why) for place, record in enumerate(window) if (why := self.policy.problem(record)) is not None),
            (len(window), None),
        )
        window = window[:end]
        unusable = [record for record in window if not record.usable and record.index not in self.finished]
        if unusable:
            yield Batch(unusable, unusable[0].index, len(unusable))
        yield from self._batches([record for record in window if record.usable])
        if problem is not None:
            raise InputError(problem)

    def _encode(self, window: list[Record]) -> None:
        usable = [record for record in window if record.usable]
        parts = [usable[start : start + _ENCODED] for start in range(0, len(usable), _ENCODED)]
        encoded = [self.pool.submit(tokenizing.Encode([record.text for record in part])) for part in parts]
        for part, tokens in zip(parts, encoded, strict=True):
            for record, ids in zip(part, tokens.result(), strict=True):
                record.tokens = list(ids)
                if self.limit is not None and len(ids) > self.limit:
                    failures.refuse_too_long(record, len(ids), self.limit)
                elif not ids:
                    record.refuse("the text has no tokens")

    def _batches(self, records: list[Record]) -> Iterator[Batch]:
        # The longest first: so a batch that doesn't fit into memory shows at once. Ties are in the order of the input.
        records = sorted(records, key=lambda record: -len(record.tokens))
        if self.auto is not None:
            records = [record for record in records if record.index not in self.finished]
        position = 0
        while position < len(records):
            # The following records are not longer, so as many of them fit, too.
            size = len(self._take(records, position))
            is_full = self.refill and (self.auto is None or self.auto.settled)
            batch = records[position : position + size * (STRETCH if is_full else 1)]
            position += len(batch)
            if any(record.index not in self.finished for record in batch):
                yield Batch(batch, min(record.index for record in batch), size)

    def _take(self, records: Sequence[Record], position: int) -> list[Record]:
        size = self.fixed if self.auto is None else self.auto.size
        longest = len(records[position].tokens) if self.by_tokens else 1
        return list(records[position : position + max(1, size // longest)])

    def succeeded(self, records: Sequence[Record], speed: float) -> None:
        """Note that a batch of these records was generated, at `speed`."""
        if self.auto is not None:
            self.auto.succeeded(self._units(records), speed)

    def failed(self, records: Sequence[Record]) -> None:
        """Note that a batch of these records ran out of memory."""
        if self.auto is not None:
            self.auto.failed(self._units(records))

    def failed_full(self, records: Sequence[Record]) -> None:
        """Note that memory ran out while a batch was kept full with these records."""
        self.failed(records)
        self.refill = self.auto is not None  # with a fixed size it would run out again

    def _units(self, records: Sequence[Record]) -> int:
        return len(records) * (max(len(record.tokens) for record in records) if self.by_tokens else 1)
