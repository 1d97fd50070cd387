"""Generates tokens and scores for batches of records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from fastgen.memory.limits import is_out_of_memory
from fastgen.pipeline import offline
from fastgen.pipeline.batching import release_memory, run_with_backoff
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.transformers.batches import Batch, Source
from fastgen.pipeline.transformers.hypotheses import Hypotheses, hypotheses_of
from fastgen.pipeline.transformers.records import Record


@dataclass
class Rows:
    """The tokens and scores of all hypotheses of a batch, record by record."""

    rows: list[list[int]]
    scores: list[float | None]


class Generator:
    """Generates batches, in smaller parts where memory runs out."""

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        source: Source,
        *,
        seed: int,
        scores: bool,
        warn: Callable[[str], None],
        tokenizer: Any = None,
        trie: Any = None,
    ) -> None:
        """`tokenizer`: needed only for `stop_strings`; `trie`: of the outputs to choose from."""
        self._model, self._config, self.source = model, config, source
        self._seed, self.has_scores, self._warn = seed, scores, warn
        self.progress: Callable[[int, int], None] = lambda records, tokens: None  # called when records are ready
        self.per_record = int(config.num_return_sequences or 1)
        # Without this the log-probabilities of all tokens would be kept: 64 MB a step for 64 sentences and 5 beams.
        config._fastgen_sequence_scores_only = scores
        self._options = {"generation_config": config, "return_dict_in_generate": scores, "output_scores": scores}
        if trie is not None:
            self._options["prefix_allowed_tokens_fn"] = trie
        if config.stop_strings:
            self._options["tokenizer"] = tokenizer

    def why_not_refilled(self, wished: bool | None) -> str | None:
        """Why batches are not kept full, or None."""
        with _refusals():
            return offline.why_not_refilled(self._model, [self._config.pad_token_id], wished, self._options)

    def __call__(self, batch: Batch) -> Rows:
        """Generate all hypotheses of `batch`; a record that doesn't fit into memory alone gets an `error` and none."""
        if self._config.do_sample:
            # Seeded for each batch, so that a resumed run draws the same numbers.
            torch.manual_seed(((self._seed << 32) + batch.number) % 2**63)
        full = self._refilled(batch) if batch.size < len(batch.records) else {}
        rest = [record for record in batch.records if record.index not in full]
        found: list[Hypotheses] = []
        for first in range(0, len(rest), batch.size):
            found += run_with_backoff(rest[first : first + batch.size], self._run, self._out_of_memory)
        full.update({record.index: one for record, one in zip(rest, found, strict=True)})
        all_found = [full[record.index] for record in batch.records]
        return Rows(
            [row for rows, _ in all_found for row in rows], [score for _, scores in all_found for score in scores]
        )

    def _refilled(self, batch: Batch) -> dict[int, Hypotheses]:
        """Generate with the batch kept full; returns hypotheses by record index, not all if memory runs out."""
        full: dict[int, Hypotheses] = {}
        try:
            for part, found in self._generated(batch.records, batch.size, refill=True):
                full.update({record.index: one for record, one in zip(part, found, strict=True)})
                self._done(found)
            return full
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # after the `except` block, as the traceback holds the tensors
        self.source.failed_full(batch.records)
        self._warn(f"out of memory while {batch.size} records were kept in a batch: going on without refill")
        return full

    def _out_of_memory(self, part: Sequence[Record]) -> None:
        self.source.failed(part)
        self._warn(f"out of memory with {len(part)} records in a batch: going on with halves")

    def _run(self, records: Sequence[Record]) -> list[Hypotheses]:
        started = time.perf_counter()
        try:
            found = self._generate(records)
        except (MemoryError, RuntimeError) as error:
            if len(records) > 1 or not is_out_of_memory(error):
                raise
            records[0].refuse("out of memory, even alone in its batch")
            if (problem := self.source.policy.problem(records[0])) is not None:
                raise InputError(problem) from error
            found = [Hypotheses([], [])]
            self._done(found)
            return found
        work = sum(len(record.tokens) for record in records) + sum(len(row) for rows, _ in found for row in rows)
        self.source.succeeded(records, work / (time.perf_counter() - started))
        self._done(found)
        return found

    def _done(self, found: list[Hypotheses]) -> None:
        pad = self._config.pad_token_id
        self.progress(len(found), sum(len(row) - row.count(pad) for rows, _ in found for row in rows))

    def _generate(self, records: Sequence[Record]) -> list[Hypotheses]:
        return [one for _, found in self._generated(records, len(records)) for one in found]

    def _generated(
        self, records: Sequence[Record], size: int, *, refill: bool = False
    ) -> Iterator[tuple[list[Record], list[Hypotheses]]]:
        """Yield records and the hypotheses of each, as soon as they are ready; `size` records decode together."""
        tokens = [record.tokens for record in records]
        with _refusals():
            for part, output, longest in offline.generated(
                self._model, tokens, self._options, batch_size=size, refill=refill
            ):
                yield [records[index] for index in part], hypotheses_of(self._model, self._config, output, longest)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn an error of transformers about a combination of flags into an InputError."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"transformers refuses to generate: {first_line(error)}.") from error
