"""`SequenceGenerator.generate`, stock's or fastgen's."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import fastgen
from fastgen import installing
from fastgen.bench import fairseq_models
from fastgen.bench.runners import Missing, place

_UNPICKLING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # fairseq's checkpoints hold more than weights


@contextlib.contextmanager
def _unpickling() -> Iterator[None]:
    """Inside the block, torch unpickles whatever a checkpoint holds, unless the user has chosen otherwise."""
    before = os.environ.get(_UNPICKLING)
    os.environ.setdefault(_UNPICKLING, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNPICKLING]


class Runner:
    host = "fairseq"

    def __init__(self, order: dict[str, Any]) -> None:
        logging.disable(logging.INFO)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import fairseq
                from fairseq.sequence_generator import SequenceGenerator
        except ImportError:
            raise Missing(f"fairseq is not installed: {installing.command('fairseq')}") from None
        import torch

        self._versions = {"torch": torch.__version__, "fairseq": fairseq.__version__}
        with _unpickling():
            job = fairseq_models.build(order["task"], order["folders"])
        self._job, self._end = job, job.words.eos()
        self.model = job.model.to(device=order["device"], dtype=getattr(torch, order["dtype"]))
        self._batches = [self._moved(batch, order["device"]) for batch in job.batches]
        self._prefixes = [x.to(order["device"]) for x in job.prefixes] or [None] * len(job.batches)
        self._generator = SequenceGenerator([self.model], job.words, **job.options).to(order["device"])

    @staticmethod
    def _moved(batch: dict[str, Any], device: str) -> dict[str, Any]:
        return {"net_input": {name: value.to(device) for name, value in batch["net_input"].items()}}

    def versions(self) -> dict[str, str]:
        return self._versions

    def generate(self) -> list[Any]:
        found: list[Any] = []
        for batch, prefix in zip(self._batches, self._prefixes, strict=True):
            found += self._generator.generate([self.model], batch, prefix_tokens=prefix)
        return found

    def outputs(self, generated: list[Any]) -> dict[str, Any]:
        given = [0 if prefix is None else prefix.shape[1] for prefix in self._prefixes]
        prompts = [n for n, batch in zip(given, self._batches, strict=True) for _ in batch["net_input"]["src_tokens"]]
        best = (hypotheses[0]["tokens"].tolist() for hypotheses in generated)
        return {
            "rows": [[hypothesis["tokens"].tolist() for hypothesis in hypotheses] for hypotheses in generated],
            "scores": [[float(hypothesis["score"]) for hypothesis in hypotheses] for hypotheses in generated],
            "tokens": [
                [token for token in row[prompt:] if token != self._end]
                for row, prompt in zip(best, prompts, strict=True)
            ],
        }

    def keep(self, number: int) -> None:
        """From now on there is this input alone."""
        batch, row = place((len(batch["net_input"]["src_tokens"]) for batch in self._batches), number)
        inputs, prefix = self._batches[batch]["net_input"], self._prefixes[batch]
        self._batches = [{"net_input": {name: value[row] for name, value in inputs.items()}}]
        self._prefixes = [None if prefix is None else prefix[row]]

    def cache_bytes(self) -> int | None:
        return max((call.cache_bytes or 0 for call in fastgen.status().calls), default=0) or None
