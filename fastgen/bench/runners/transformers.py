"""`model.generate`, stock's or fastgen's: which of them is decided by the environment, before the process starts."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import fastgen
from fastgen.bench import allowed, models
from fastgen.bench.runners import place


class Runner:
    host = "transformers"

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._order, self._torch, self._transformers = order, torch, transformers
        job = models.build(order["task"], order["folders"], order["device"], order["dtype"])
        self.model, self.batches, self.options = job.model, job.batches, dict(job.options)
        self._job = job
        self.options |= order["options"].get("generate", {})
        if order["options"].get("function"):
            self.options["prefix_allowed_tokens_fn"] = allowed.function_for(order["task"], job.model)
        if "num_beam_groups" in self.options and not fastgen.status().enabled:
            self.options |= self._groups()
        if order["options"].get("compiled"):
            self.options["compile_config"] = self._compilation()
        self._cache = 0

    def _groups(self) -> dict[str, Any]:
        """The loop over beams in groups, where stock has none of its own."""
        if hasattr(self._transformers.GenerationMixin, "_group_beam_search"):
            return {}
        from fastgen.optimizer.transformers.generate.diverse_beam_search import group_beam_search

        return {"custom_generate": group_beam_search}

    def _compilation(self) -> Any:
        if self._order["device"] != "cpu":
            return None  # as the host does by itself
        how = self._transformers.CompileConfig(mode="default")
        how._compile_all_devices = True  # by itself it compiles on accelerators alone
        return how

    def versions(self) -> dict[str, str]:
        return {"torch": self._torch.__version__, "transformers": self._transformers.__version__}

    def generate(self) -> list[list[int]]:
        rows: list[list[int]] = []
        for batch in self.batches:
            if self.options.get("do_sample"):
                self._torch.manual_seed(0)
            rows += self.model.generate(**batch, **self.options).tolist()
        return rows

    def outputs(self, generated: list[list[int]]) -> dict[str, Any]:
        found = zip(generated, self._job.prompts(), strict=True)
        return {"rows": generated, "tokens": [self._new(row[prompt:]) for row, prompt in found]}

    def _new(self, row: list[int]) -> list[int]:
        """Without the end token and what pads it."""
        ends = self._job.ends
        return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]

    def keep(self, number: int) -> None:
        """From now on there is this input alone."""
        batch, row = place((len(next(iter(batch.values()))) for batch in self.batches), number)
        self.batches = [{name: value[row] for name, value in self.batches[batch].items()}]
        self._job = dataclasses.replace(self._job, batches=self.batches)

    # What the first call alone is asked for.

    @contextlib.contextmanager
    def watching(self) -> Any:
        """Notes the largest cache that stock's forward passes return; fastgen says its own."""
        if fastgen.status().enabled:
            yield
            return
        handle = self.model.register_forward_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, module: Any, inputs: Any, outputs: Any) -> None:
        from fastgen.optimizer.transformers.versions import CACHE  # brings the host with it

        cache = getattr(outputs, CACHE, None)
        parts = (getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross"))
        caches = [part for part in parts if part is not None] or [cache]
        tensors = (x for part in caches for layer in getattr(part, "layers", ()) for x in (layer.keys, layer.values))
        self._cache = max(self._cache, sum(x.nbytes for x in tensors if x is not None))

    def cache_bytes(self) -> int | None:
        if fastgen.status().enabled:
            return max((call.cache_bytes or 0 for call in fastgen.status().calls), default=0) or None
        return self._cache or None
