"""A file of lines through a model: read, tokenise, generate, detokenise, write; with any part of fastgen alone.

Stock's way is the script that everybody writes: a loop over batches in which one step follows the other. The parts:
"pipeline" has worker processes tokenise and detokenise while the next batch is generated, "ngrams" takes fastgen's
operator for the bans of repeated n-grams. The tree is there where the environment enables fastgen; without "ngrams" it
then has the host's own processor for the bans.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import fastgen
from fastgen.bench import data, models
from fastgen.bench.data import Folders
from fastgen.bench.runners import transformers
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

_WORKERS = 2


def handler(task: dict[str, Any], folders: Folders) -> Callable[[tuple[str, list[Any]]], list[Any]]:
    """What a worker does: ("tokens", texts) or ("text", rows)."""
    texts = data.of(task, folders)

    def work(asked: tuple[str, list[Any]]) -> list[Any]:
        what, items = asked
        return [getattr(texts, what)(item) for item in items]

    return work


class Runner(transformers.Runner):
    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        task, folders, parts = order["task"], order["folders"], order["options"]["parts"]
        self._sources = data.of(task, folders).sources
        self._size = task["batch"] * (order["options"].get("times", 1))
        self._pad = self.model.config.pad_token_id
        if ("ngrams" in parts) != fastgen.status().enabled:  # else each has its own way of banning
            banning = _operator if "ngrams" in parts else _hosts
            self.options["logits_processor"] = [banning(self.options.pop("no_repeat_ngram_size"))]
        self._pool = WorkerPool(_WORKERS if "pipeline" in parts else 0, handler, task, folders)
        for started in [self._pool.submit(("tokens", self._sources[:1])) for _ in range(4 * _WORKERS)]:
            started.result()  # they start before the clock
        self._is_overlapped = "pipeline" in parts

    def generate(self) -> list[list[int]]:
        rows: list[list[int]] = []
        with tempfile.TemporaryFile("w", encoding="utf-8") as file:

            def write(texts: list[str], note: None) -> None:
                file.writelines(f"{text}\n" for text in texts)

            def decoded(ids: list[list[int]]) -> Any:
                inputs = {name: x.to(self.model.device) for name, x in models.padded(ids, self._pad).items()}
                found = self.model.generate(**inputs, **self.options).tolist()
                rows.extend(found)
                return self._pool.submit(("text", found)), None

            if self._is_overlapped:
                run_stages(self._read(), decoded, write)
            else:
                for ids in self._read():
                    write(decoded(ids)[0].result(), None)
        return rows

    def _read(self) -> Iterator[list[list[int]]]:
        """Tokens of each batch; the next one's are made while it is generated, if there are workers."""
        waiting = None
        for start in range(0, len(self._sources), self._size):
            future = self._pool.submit(("tokens", self._sources[start : start + self._size]))
            if not self._is_overlapped:
                yield future.result()
                continue
            if waiting is not None:
                yield waiting.result()
            waiting = future
        if waiting is not None:
            yield waiting.result()

    def outputs(self, generated: list[list[int]]) -> dict[str, Any]:
        return {"tokens": super().outputs(generated)["tokens"]}  # padding depends on the batch


def _hosts(n: int) -> Any:
    from transformers import NoRepeatNGramLogitsProcessor

    class Own(NoRepeatNGramLogitsProcessor):
        """The host's, word for word: fastgen leaves a user's class alone."""

    return Own(n)


def _operator(n: int) -> Any:
    from transformers import LogitsProcessor

    from fastgen import ops

    class Operator(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ops.ban_repeated_ngrams_(input_ids, scores, n)
            return scores

    return Operator()
