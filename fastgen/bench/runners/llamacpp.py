"""llama.cpp through llama-cpp-python, on a file that `gguf` has written, without torch in its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.bench.runners.gguf import FLOAT32, INT8, JOB


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import llama_cpp

        self._llama_cpp = llama_cpp
        folder, is_int8 = Path(order["folder"]), bool(order["options"].get("int8"))
        self._job = json.loads((folder / JOB).read_text())
        keys = {} if is_int8 else {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        self._engine = llama_cpp.Llama(
            str(folder / (INT8 if is_int8 else FLOAT32)),
            n_ctx=max(map(len, self._job["prompts"])) + self._job["new"],
            n_threads=order["threads"],
            n_threads_batch=order["threads"],
            verbose=False,
            **keys,
        )

    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python": self._llama_cpp.__version__}

    def generate(self) -> list[list[int]]:
        return [self._continued(prompt) for prompt in self._job["prompts"]]

    def _continued(self, prompt: list[int]) -> list[int]:
        self._engine.reset()  # or it would go on from a prompt that begins alike
        found: list[int] = []
        for token in self._engine.generate(prompt, temp=0.0, repeat_penalty=1.0):
            if token in self._job["ends"]:
                break
            found.append(token)
            if len(found) == self._job["new"]:
                break
        return found

    def outputs(self, generated: list[list[int]]) -> dict[str, Any]:
        return {"tokens": generated}
