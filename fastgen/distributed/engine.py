"""Records in, outputs out: the model of an actor, loaded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ray
import torch

import fastgen
from fastgen.distributed.job import Job
from fastgen.distributed.parts import Outputs
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transformers import prepare, records, tokenizing
from fastgen.pipeline.transformers.failures import outputs_of
from fastgen.pipeline.workers import WorkerPool


class Engine:
    """Outputs of records, as `fastgen-generate-transformers` makes them."""

    def __init__(self, job: Job) -> None:
        if job.version != fastgen.__version__:
            raise InputError(
                f"This node has fastgen {fastgen.__version__}, the driver {job.version}: install the same on both."
            )
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))  # what was asked for, whatever else is on the node
        known = prepare.prepared(job.settings)
        self._pool = WorkerPool(job.settings.workers or 0, tokenizing.build, known.spec)
        self._generator = prepare.generator_of(
            job.settings, known, self._pool, iter(()), form=job.form, warn=self._warn
        )
        self.warnings: list[str] = []

    def outputs(
        self, found: Iterable[records.Record], progress: Any = lambda records, tokens: None
    ) -> Iterator[tuple[records.Record, Outputs]]:
        """Each record with its hypotheses, empty ones for one that can't be used; in any order."""
        generator, source = self._generator, self._generator.source
        generator.progress, source.records = progress, iter(found)
        ready: list[Any] = []  # batches whose texts are being made
        for window in source:
            for batch in source.cut(window):
                if not batch.records[0].usable:
                    progress(len(batch.records), 0)
                    ready.append((batch.records, [], self._pool.submit(tokenizing.Decode([]))))
                    continue
                hypotheses = generator(batch)
                texts = self._pool.submit(tokenizing.Decode(hypotheses.rows))
                ready.append((batch.records, hypotheses.scores, texts))
        for done, scores, texts in ready:
            pairs = iter(zip(texts.result(), scores, strict=True))
            for record in done:
                yield record, outputs_of(record, pairs, generator.per_record)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
