"""Answers standard input line by line on standard output, word by word as the words are decided: --stream."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from fairseq import utils

from fastgen.optimizer import streams
from fastgen.pipeline import growing_line
from fastgen.pipeline.errors import DONE, InputError, counted
from fastgen.pipeline.fairseq.load import Loaded, check, load_for_lines
from fastgen.pipeline.fairseq.output import logging_to
from fastgen.pipeline.transformers.growing_text import stable


def run(cfg: Any) -> int:
    """Answer each line of standard input by a line of standard output; returns the exit code.

    The lines are the texts of fairseq-interactive's D lines. Raises InputError for settings, or a line, that can't be
    used.
    """
    check(cfg)
    with logging_to(sys.stderr):
        answer = _Answers(load_for_lines(cfg, logging.getLogger("fairseq_cli.generate")))
        growing_line.answer_lines(answer.pieces)
    return DONE


class _Answers:
    """Searches for one line at a time."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        positions = (model.max_positions() for model in loaded.models)
        most: Any = utils.resolve_max_positions(loaded.task.max_positions(), *positions)
        self._most = most[0] if isinstance(most, tuple) else most  # source tokens, if that is bounded

    def pieces(self, number: int, text: str) -> Iterable[str]:
        """The pieces of the answer to line `number`."""
        sample = self._sample(number, text.strip())
        return growing_line.grown(streams.stream_search(lambda: self._search(sample)), self._decoded, self._settled)

    def _search(self, sample: Any) -> Any:
        loaded = self._loaded
        return loaded.task.inference_step(loaded.generator, loaded.models, sample)

    def _sample(self, number: int, text: str) -> dict[str, Any]:
        """The sample that fairseq-interactive makes of a line."""
        task = self._loaded.task
        tokens, lengths = task.get_interactive_tokens_and_lengths([text], self._encoded)
        if self._most is not None and int(lengths[0]) > self._most:
            has = counted(int(lengths[0]), "token")
            raise InputError(f"Line {number} has {has}, and the model has room for {self._most}.")
        dataset = task.build_dataset_for_inference(tokens, lengths)
        inputs = dataset.collater([dataset[0]])["net_input"]
        sample = {"net_input": {name: inputs[name] for name in ("src_tokens", "src_lengths")}}
        return utils.move_to_cuda(sample) if self._loaded.device.type == "cuda" else sample

    def _encoded(self, text: str) -> str:
        for codec in (self._loaded.form.tokenizer, self._loaded.form.subwords):
            text = text if codec is None else codec.encode(text)
        return text

    def _decoded(self, tokens: list[int]) -> str:
        form = self._loaded.form
        text: str = form.target.string(tokens, form.post_process, extra_symbols_to_ignore=form.ignored)
        for codec in (form.subwords, form.tokenizer):
            text = text if codec is None else codec.decode(text)
        return text.replace("\n", " ")  # one line for each input

    def _settled(self, text: str) -> str:
        """The part of a growing text that may be written: a tokenizer may change a word until the next begins."""
        if self._loaded.form.tokenizer is not None:
            return text[: max(text.rfind(" "), 0)]
        return stable(text, cleans_up=self._loaded.form.subwords is not None).rstrip(" ")
