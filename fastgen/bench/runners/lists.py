"""`fastgen.generate`: all inputs of a task as one list."""

from __future__ import annotations

from typing import Any

import fastgen
from fastgen.bench.runners import transformers


class Runner(transformers.Runner):
    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        pairs = ((batch["input_ids"], batch["attention_mask"]) for batch in self.batches)
        self._inputs = [ids[mask.bool()] for batch in pairs for ids, mask in zip(*batch, strict=True)]
        self._how = {"batch_size": order["task"]["batch"], "refill": bool(order["options"].get("refill"))}

    def generate(self) -> list[list[int]]:
        found = fastgen.generate(self.model, self._inputs, **self._how, **self.options)
        return [hypotheses[0].tolist() for hypotheses in found]

    def outputs(self, generated: list[list[int]]) -> dict[str, Any]:
        return {"tokens": super().outputs(generated)["tokens"]}  # there is no padding
