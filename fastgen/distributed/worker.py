"""The workers in actors: they load the model once, and generate blocks. Only the engine imports torch."""

from __future__ import annotations

import logging
import traceback
import zlib
from dataclasses import dataclass
from typing import Any

import pyarrow
import ray

from fastgen.distributed import blocks
from fastgen.distributed.actors import PROGRESS
from fastgen.distributed.job import Job
from fastgen.distributed.parts import SCHEMA, Mark, Parts, listed
from fastgen.pipeline import remote
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.transformers import records
from fastgen.pipeline.transformers.failures import policy_of


@dataclass
class Done:
    """The outcome of a block."""

    block: blocks.Block
    mark: Mark | None  # None if there was a problem
    warnings: list[str]
    problem: str = ""
    trace: str = ""  # of the problem


class BlockWorker:
    """An actor of a run. Errors are returned in `Done.problem`, not raised: Ray would print them in fifty lines."""

    def __init__(self, job: Job, folder: str) -> None:
        self._job, self._folder = job, folder
        self._parts: Parts | None = None
        self._engine: Any = None  # an Engine, loaded for the first block
        self._told = (-1, 0, 0)

    def node(self) -> str:
        """The identifier of the actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group=PROGRESS, enable_task_events=False)
    def told(self) -> tuple[int, int, int]:
        """The number of the current block, and how many of its records and tokens are done."""
        return self._told

    def generate(self, block: blocks.Block) -> Done:
        """Generate a block, and write the outputs as a part."""
        warnings: list[str] = []
        self._told = block.number, 0, 0
        try:
            if self._parts is None:
                self._parts = Parts(self._folder, self._job.form)
            # The part may exist: a worker may have written it and died before it could say so.
            done = Done(block, self._parts.mark(block) or self._done(block, self._parts), warnings)
        except Exception as error:
            said = remote.without_secrets(first_line(error))
            problem = str(error) if isinstance(error, InputError) else f"{block}: {said}"
            done = Done(block, None, warnings, problem, traceback.format_exc())
        if self._engine is not None:
            warnings += self._engine.warnings
            self._engine.warnings.clear()
        return done

    def _done(self, block: blocks.Block, parts: Parts) -> Mark:
        if self._engine is None:  # only now, so that errors get to the driver
            from fastgen.distributed.engine import Engine

            self._engine = Engine(self._job)

        def tell(records: int, tokens: int) -> None:
            self._told = block.number, self._told[1] + records, self._told[2] + tokens

        found = dict(
            (record.index, (record, outputs))
            for record, outputs in self._engine.outputs(blocks.read(block, self._job.settings.text_field), tell)
        )
        in_order = [found[index] for index in sorted(found)]
        if len(in_order) != block.count:
            raise InputError(f"{block.name} was changed while the run read it: start again.")
        policy = policy_of(self._job.settings.on_error, self._job.form)
        return parts.write(block, in_order, self._told[2], policy)


class RowWorker:
    """An actor of Ray Data for rows of a dataset: adds the columns `outputs` and `error`."""

    def __init__(self, job: Job) -> None:
        from fastgen.distributed.engine import Engine

        self._engine, self._field = Engine(job), job.settings.text_field

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        if self._field not in table.column_names:
            raise InputError(f"The dataset has no column {self._field!r}: text_field names that of the text.")
        texts = table.column(self._field).to_pylist()
        # Seeds the sampling: rows of a dataset have no numbers, and each batch must draw other numbers.
        first = zlib.crc32(repr(texts).encode())
        rows = []
        for index, text in enumerate(texts):
            record = records.Record(first + index, "dataset", before=first)
            if isinstance(text, str):
                records.fill_text(record, text)
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
