"""OpenVINO through openvino-genai, on a model that optimum-intel has exported, without torch in its process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fastgen.bench.runners import Missing

JOB, IDS, MASK = "openvino.json", "openvino-ids-{}.npy", "openvino-mask-{}.npy"  # which `openvino_inputs` writes

# By itself it computes in bfloat16 where the CPU has that, keeps keys and values as 8 bits, and rounds activations.
_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def properties(is_int8: bool, threads: int) -> dict[str, Any]:
    """Of a pipeline: all in float32, or what it does with 8 bits by default."""
    return {"INFERENCE_NUM_THREADS": threads, **({} if is_int8 else _FLOAT32)}


def check(folder: str | Path | None) -> None:
    """Missing if OpenVINO is not installed, or nobody has named the folder with exported models."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise Missing("OpenVINO is not installed: pip install openvino-genai")
    if folder is None:
        raise Missing("it needs --openvino DIR, with the models that optimum-intel has exported")


def exported(folder: str | Path, model: str, is_int8: bool) -> Path:
    """The model's folder in that of --openvino; Missing if there is none."""
    found = Path(folder, f"{model}-{'int8' if is_int8 else 'float32'}")
    if not any(found.glob("openvino*.xml")):
        raise Missing(f"--openvino {folder} has no exported model {found.name}")
    return found


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._openvino_genai = openvino_genai
        is_int8 = bool(order["options"].get("int8"))
        model = exported(order["folders"]["openvino"], order["task"]["model"], is_int8)
        folder = Path(order["folder"])
        self._job = json.loads((folder / JOB).read_text())
        self._inputs = [
            openvino_genai.TokenizedInputs(
                *(openvino.Tensor(numpy.load(folder / name.format(number))) for name in (IDS, MASK))
            )
            for number in range(self._job["batches"])
        ]
        self._config = openvino_genai.GenerationConfig(
            **self._job["options"], stop_token_ids=set(self._job["ends"]), do_sample=False
        )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # by default a second call reads no prompt
        scheduler.max_num_batched_tokens = sys.maxsize  # a prompt is one step, as by default
        chosen = properties(is_int8, order["threads"])
        self._engine = openvino_genai.LLMPipeline(str(model), "CPU", scheduler_config=scheduler, **chosen)

    def versions(self) -> dict[str, str]:
        return {"openvino-genai": self._openvino_genai.__version__}

    def generate(self) -> list[list[int]]:
        return [row for batch in self._inputs for row in self._engine.generate(batch, self._config).tokens]

    def outputs(self, generated: list[list[int]]) -> dict[str, Any]:
        return {"tokens": [self._new(row) for row in generated]}

    def _new(self, row: list[int]) -> list[int]:
        """Without the end token."""
        return row[:-1] if row and row[-1] in self._job["ends"] else row
