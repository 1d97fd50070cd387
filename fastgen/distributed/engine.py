"""Turns records into outputs with an actor's model, which is loaded once."""

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
    """Generates outputs for records, as `fastgen-generate-transformers` does."""

    def __init__(self, job: Job) -> None:
        if job.version != fastgen.__version__:
            raise InputError(
                f"This node has fastgen {fastgen.__version__}, the driver {job.version}: install the same on both."
            )
        fastgen.configure(weights=job.weights)
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))  # as many as were asked for, whatever else runs on the node
        known = prepare.prepared(job.settings)
        self._pool = WorkerPool(job.settings.workers or 0, tokenizing.build, known.spec)
        self._generator = prepare.generator_of(
            job.settings, known, self._pool, iter(()), form=job.form, warn=self._warn
        )
        self.warnings: list[str] = []

    def outputs(
        self, found: Iterable[records.Record], progress: Any = lambda records, tokens: None
    ) -> Iterator[tuple[records.Record, Outputs]]:
        """Yield each record with its hypotheses, in any order; for unusable records the hypotheses are empty."""
        generator, source = self._generator, self._generator.source
        generator.progress, source.records = progress, iter(found)
        ready: list[Any] = []  # batches that are being detokenised
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
