"""What an actor does: the model loaded once, then block after block."""

from __future__ import annotations

import argparse
import json
import logging
import traceback
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow
import ray
import torch

import fastgen
from fastgen.cli.transformers import prepare, records, tokenizing
from fastgen.distributed import blocks
from fastgen.distributed.parts import SCHEMA, Mark, Outputs, Parts, listed
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.workers import WorkerPool

ATTEMPTS = 4  # a block that kills its worker this often is at fault itself: Ray would go on for ever


@dataclass(frozen=True)
class Job:
    """What every actor of a run is told."""

    args: argparse.Namespace
    form: str  # of the output
    version: str = fastgen.__version__


class Engine:
    """Outputs of records, as `fastgen-generate-transformers` makes them."""

    def __init__(self, job: Job) -> None:
        if job.version != fastgen.__version__:
            raise InputError(f"This node has fastgen {fastgen.__version__}, the driver has {job.version}.")
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))  # what was asked for, whatever else is on the node
        known = prepare.prepared(job.args)
        self._pool = WorkerPool(job.args.workers or 0, tokenizing.build, known.spec)
        self._generator = prepare.generator_of(job.args, known, self._pool, iter(()), form=job.form, warn=self._warn)
        self.warnings: list[str] = []

    def outputs(
        self, found: Iterable[records.Record], progress: Any = lambda records, tokens: None
    ) -> Iterator[tuple[records.Record, Outputs]]:
        """Each record with its hypotheses, none for one that failed; in any order."""
        generator, source = self._generator, self._generator.source
        generator.progress, source.records = progress, iter(found)
        ready: list[Any] = []  # batches whose texts are being made
        for window in source:
            for batch in source.cut(window):
                if batch.records[0].error is not None:
                    progress(len(batch.records), 0)
                    ready.append((batch.records, [], self._pool.submit(tokenizing.Decode([]))))
                    continue
                hypotheses = generator(batch)
                texts = self._pool.submit(tokenizing.Decode(hypotheses.rows))
                ready.append((batch.records, hypotheses.scores, texts))
        for done, scores, texts in ready:
            pairs = iter(zip(texts.result(), scores, strict=True))
            for record in done:
                yield record, [] if record.error else [next(pairs) for _ in range(generator.per_record)]

    def _warn(self, text: str) -> None:
        self.warnings.append(text)


class BlockWorker:
    """An actor of Ray Data: blocks in, what became of them out. What it can't do is said in `problem`, not raised."""

    def __init__(self, job: Job, folder: str, counter: Any) -> None:
        self._job, self._counter = job, counter
        self._parts = Parts(folder, job.form)
        self._engine: Engine | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One row: `number`, `count`, `failed`, `tokens`, `errors`, `warnings`, `problem`, `trace`."""
        block = blocks.Block(**json.loads(batch["block"][0]))
        row: dict[str, Any] = {"number": block.number, "problem": "", "trace": "", "warnings": []}
        try:
            # A task that Ray repeats may have several blocks, of which some are done.
            mark = self._parts.mark(block.number) or self._done(block)
            row |= {"count": mark.count, "failed": mark.failed, "tokens": mark.tokens, "errors": mark.errors}
        except Exception as error:  # of whatever kind: Ray would say it in fifty lines
            where = f"{block.name}, records {block.first - block.before + 1} and the {block.count - 1} that follow"
            row["problem"] = str(error) if isinstance(error, InputError) else f"{where}: {first_line(error)}"
            row |= {"trace": traceback.format_exc(), "count": 0, "failed": 0, "tokens": 0, "errors": []}
        if self._engine is not None:
            row["warnings"], self._engine.warnings = self._engine.warnings, []
        return {"summary": [json.dumps(row)]}

    def _done(self, block: blocks.Block) -> Mark:
        node = ray.get_runtime_context().get_node_id()
        if ray.get(self._counter.begin.remote(block.number, node)) > ATTEMPTS:
            raise RuntimeError(f"a worker died {ATTEMPTS} times at these records")
        if self._engine is None:  # not before: what it raises must find its way to the driver
            self._engine = Engine(self._job)
        told = _Told(block.number, self._counter)
        found = dict(
            (record.index, (record, outputs))
            for record, outputs in self._engine.outputs(blocks.read(block, self._job.args.text_field), told)
        )
        in_order = [found[index] for index in sorted(found)]
        if len(in_order) != block.count:
            raise InputError(f"{block.name} was changed while the run read it: start again.")
        return self._parts.write(
            block.number, [record for record, _ in in_order], [outputs for _, outputs in in_order], told.tokens
        )


class _Told:
    """Tells the driver's counter how much of a block is done: the sums so far, so that a repeated block counts once."""

    def __init__(self, block: int, counter: Any) -> None:
        self._block, self._counter = block, counter
        self.records = self.tokens = 0

    def __call__(self, records: int, tokens: int) -> None:
        self.records, self.tokens = self.records + records, self.tokens + tokens
        self._counter.add.remote(self._block, self.records, self.tokens)


class RowWorker:
    """An actor of Ray Data over rows of a dataset: columns `outputs` and `error` are added."""

    def __init__(self, job: Job) -> None:
        self._engine, self._field = Engine(job), job.args.text_field

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        if self._field not in table.column_names:
            raise InputError(f"The dataset has no column {self._field!r}: text_field names that of the text.")
        texts = table.column(self._field).to_pylist()
        # Seeds the sampling: rows of a dataset have no numbers, and what each batch draws must differ.
        first = zlib.crc32(repr(texts).encode())
        rows = []
        for index, text in enumerate(texts):
            record = records.Record(first + index, "dataset", before=first)
            if isinstance(text, str):
                records.fill_text(record, text, self._field)
            else:
                record.refuse(f"no text in the column {self._field!r}")
            rows.append(record)
        outputs: list[Any] = [None] * len(rows)
        for record, found in self._engine.outputs(rows):
            outputs[record.index - first] = None if record.error else listed(found)
        for warning in self._engine.warnings:
            logging.getLogger("fastgen").warning(warning)
        self._engine.warnings.clear()
        errors = [record.error for record in rows]
        for name, values in (("outputs", outputs), ("error", errors)):
            table = table.append_column(name, pyarrow.array(values, SCHEMA.field(name).type))
        return table
