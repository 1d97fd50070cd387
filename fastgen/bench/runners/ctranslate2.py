"""CTranslate2 on a converted model (see `convert`), without torch in its process.

Beside its OpenMP threads, torch's take 1.3 to 1.7 times as long at batch 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.bench.runners.convert import FEATURES, JOB, MODEL

_INT8 = {"float32": "int8", "float16": "int8_float16", "bfloat16": "int8_bfloat16"}  # of weights; the rest as others


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import ctranslate2

        self._ctranslate2 = ctranslate2
        folder = Path(order["folder"])
        self._job = json.loads((folder / JOB).read_text())
        self.draws_anew = "sampling_topk" in self._job["options"]
        kinds = {"Translator": ctranslate2.Translator, "Generator": ctranslate2.Generator}
        kinds["Whisper"] = ctranslate2.models.Whisper
        self._features = [self._read(folder / FEATURES.format(number)) for number, _ in enumerate(self._job["batches"])]
        self._engine = kinds[self._job["engine"]](
            str(folder / MODEL),
            device=order["device"],
            compute_type=_INT8[order["dtype"]] if order["options"].get("int8") else order["dtype"],
            inter_threads=1,
            intra_threads=order["threads"],
        )

    def versions(self) -> dict[str, str]:
        return {"ctranslate2": self._ctranslate2.__version__}

    def _read(self, path: Path) -> Any:
        """The features of a batch of clips, float32 `[B, mel, frames]`; None for text."""
        import numpy

        return self._ctranslate2.StorageView.from_array(numpy.load(path)) if path.is_file() else None

    def generate(self) -> list[list[str]]:
        engine, options = self._job["engine"], self._job["options"]
        found: list[list[str]] = []
        for batch, features in zip(self._job["batches"], self._features, strict=True):
            if engine == "Whisper":
                prompts = [[int(name) for name in row] for row in batch]
                rows = self._engine.generate(features, prompts, **options)
                found += [[str(token) for token in row.sequences_ids[0]] for row in rows]
            elif engine == "Translator":
                found += [row.hypotheses[0] for row in self._engine.translate_batch(batch, **options)]
            else:
                found += [row.sequences[0] for row in self._engine.generate_batch(batch, **options)]
        return found

    def outputs(self, generated: list[list[str]]) -> dict[str, Any]:
        return {"tokens": [[int(name) for name in row] for row in generated]}
