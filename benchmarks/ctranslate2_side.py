"""CTranslate2 in a process of its own: beside its OpenMP threads, torch's take 1.3 to 1.7 times as long.

The child (`python ctranslate2_side.py`, no torch in it) reads lines of JSON: first how to load the model and decode,
then one batch a line, a token's name being its id. It answers "ready", then each batch's best hypotheses with the
seconds of CPU time they took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

Batch = list[list[str]]


class Engine:
    """A converted model (`spec`) and its batches, the model in a child, which ends with the `with` of this.

    `cpu_seconds` is what the answers took so far; other processes' time is told from it.
    """

    def __init__(self, spec: Any, seq2seq: bool, batches: list[Batch], threads: int, options: dict[str, Any]) -> None:
        self.cpu_seconds = 0.0
        self._batches = batches
        command = [sys.executable, __file__]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        place = {"device": "cpu", "compute_type": "float32", "inter_threads": 1, "intra_threads": threads}
        with tempfile.TemporaryDirectory() as folder:
            spec.validate()
            spec.optimize(quantization=None)
            spec.save(folder)
            self._ask({"folder": folder, "seq2seq": seq2seq, "place": place, "options": options})

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate()  # the end of its input ends it

    def decode(self) -> Iterator[list[list[int]]]:
        """Each batch's best hypotheses."""
        for batch in self._batches:
            hypotheses, seconds = self._ask(batch)
            self.cpu_seconds += seconds
            yield [[int(name) for name in hypothesis] for hypothesis in hypotheses]

    def _ask(self, question: Any) -> Any:
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._child.stdout.readline()
        if not answer:
            sys.exit(
                f"CTranslate2's process died (exit status {self._child.wait()}); its own words, if any, are above."
            )
        return json.loads(answer)


def serve() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # some versions of CTranslate2 import it where they can
    import ctranslate2

    how = json.loads(sys.stdin.readline())
    engine = (ctranslate2.Translator if how["seq2seq"] else ctranslate2.Generator)(how["folder"], **how["place"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        batch, started = json.loads(line), time.process_time()
        if how["seq2seq"]:
            best = [result.hypotheses[0] for result in engine.translate_batch(batch, **how["options"])]
        else:
            best = [result.sequences[0] for result in engine.generate_batch(batch, **how["options"])]
        print(json.dumps([best, time.process_time() - started]), flush=True)


if __name__ == "__main__":
    serve()
