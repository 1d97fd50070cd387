"""A side's process: `python -m fastgen.bench.worker`, an order in JSON on its input, then one question a line.

Each answer is a line of JSON on standard output, on which nothing else may write. Errors are answers, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from typing import Any

from fastgen.bench import data, machine, near_ties, runners
from fastgen.memory.peak import field, reset_high_water_mark


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print
    worker: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if worker is None:
                worker = Worker(question)
                answer = {"versions": worker.runner.versions()}
            else:
                answer = getattr(worker, question.pop("do"))(**question)
        except runners.Refused as error:
            answer = {"refused": str(error), "missing": isinstance(error, runners.Missing)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    def __init__(self, order: dict[str, Any]) -> None:
        if order["runner"] in runners.WITHOUT_TORCH:
            sys.modules["torch"] = None  # type: ignore[assignment]  # CTranslate2 imports it where it can, for nothing
        else:
            import torch

            torch.set_num_threads(order["threads"])
        self.order = order
        self.runner: Any = runners.runner(order)

    def first(self) -> dict[str, Any]:
        """The first call: its outputs, and the memory that it takes beyond what was loaded."""
        with contextlib.ExitStack() as stack:
            if hasattr(self.runner, "watching"):
                stack.enter_context(self.runner.watching())
            peak = stack.enter_context(Peak(self.order["device"]))
            used, started = machine.cpu_seconds(), time.perf_counter()
            generated = self.runner.generate()
            seconds, cpu = time.perf_counter() - started, machine.cpu_seconds() - used
        outputs = self.runner.outputs(generated)
        self._first = self._compared(outputs)
        answer = {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak.bytes, **outputs}
        answer["resident_bytes"] = field("VmHWM")
        if hasattr(self.runner, "cache_bytes"):
            answer["cache_bytes"] = self.runner.cache_bytes()
        if self.order["ours"]:
            import fastgen

            if fastgen.status().enabled:
                answer["tiers"] = dict(fastgen.status().counters)
        return answer

    def turn(self, calls: int) -> dict[str, Any]:
        """So many calls: mean seconds of each, CPU seconds of all, and outputs that are not as they were at first."""
        used, started = machine.cpu_seconds(), time.perf_counter()
        for _ in range(calls):
            generated = self.runner.generate()
        seconds = time.perf_counter() - started
        now = self._compared(self.runner.outputs(generated))
        changed = [number for number, (one, other) in enumerate(zip(self._first, now, strict=True)) if one != other]
        cpu = machine.cpu_seconds() - used  # all of it: what is not is taken for another process's
        return {"seconds": seconds / calls, "cpu_seconds": cpu, "changed": changed}

    def _compared(self, outputs: dict[str, Any]) -> list[Any]:
        """What is the same at every call: of a side that draws anew, the lengths."""
        if getattr(self.runner, "draws_anew", False):
            return [len(row) for row in outputs["tokens"]]
        return list(outputs.get("rows", outputs["tokens"]))

    def phases(self) -> dict[str, Any]:
        from fastgen.bench.phases import Phases

        task = self.order["task"]
        texts = data.of(task, self.order["folders"]) if task["model"] in data.TEXTS else None
        with Phases(self.runner.model, host=self.runner.host) as phases:
            outputs = self.runner.outputs(self.runner.generate())
            if texts is not None:
                for row in outputs["tokens"]:
                    texts.text(row)
        return {"phases": phases.seconds}

    def counts(self) -> dict[str, Any]:
        from fastgen.bench.counts import counted

        return {"counts": counted(self.runner.generate).as_dict()}

    def near_ties(self, number: int) -> dict[str, Any]:
        return {"answers": list(near_ties.answers(self.runner, number))}


class Peak:
    """The most memory that a block held above what was held before it, in bytes; None where that isn't known.

    On CUDA torch's own count, on Linux the process's resident memory, native buffers included.
    """

    def __init__(self, device: str) -> None:
        # Where torch is kept out, on a GPU nobody knows.
        self._cuda, self._unknown = device != "cpu", device != "cpu" and sys.modules.get("torch") is None
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        if self._unknown:
            self._before: int | None = None
        elif self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = field("VmRSS")
            reset_high_water_mark()
        return self

    def __exit__(self, *_: object) -> None:
        if self._unknown:
            return
        if self._cuda:
            import torch

            peak: int | None = torch.cuda.max_memory_allocated()
        else:
            peak = field("VmHWM")
        if peak is not None and self._before is not None:
            self.bytes = max(0, peak - self._before)


if __name__ == "__main__":
    main()
