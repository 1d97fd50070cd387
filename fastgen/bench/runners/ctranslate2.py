"""CTranslate2 on a converted model (see `convert`), without torch in its process.

Beside its OpenMP threads, torch's take 1.3 to 1.7 times as long at batch 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.bench.runners.convert import JOB, MODEL

_INT8 = {"float32": "int8", "float16": "int8_float16", "bfloat16": "int8_bfloat16"}  # of weights; the rest as others


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import ctranslate2

        self._ctranslate2 = ctranslate2
        folder = Path(order["folder"])
        self._job = json.loads((folder / JOB).read_text())
        self.draws_anew = "sampling_topk" in self._job["options"]
        kind = ctranslate2.Translator if self._job["is_seq2seq"] else ctranslate2.Generator
        self._engine = kind(
            str(folder / MODEL),
            device=order["device"],
            compute_type=_INT8[order["dtype"]] if order["options"].get("int8") else order["dtype"],
            inter_threads=1,
            intra_threads=order["threads"],
        )

    def versions(self) -> dict[str, str]:
        return {"ctranslate2": self._ctranslate2.__version__}

    def generate(self) -> list[list[str]]:
        found: list[list[str]] = []
        for batch in self._job["batches"]:
            if self._job["is_seq2seq"]:
                found += [x.hypotheses[0] for x in self._engine.translate_batch(batch, **self._job["options"])]
            else:
                found += [x.sequences[0] for x in self._engine.generate_batch(batch, **self._job["options"])]
        return found

    def outputs(self, generated: list[list[str]]) -> dict[str, Any]:
        return {"tokens": [[int(name) for name in row] for row in generated]}
