"""Answers standard input line by line on standard output, word by word as the words are decided: --stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastgen.optimizer import streams
from fastgen.pipeline import growing_line
from fastgen.pipeline.errors import DONE, InputError, counted
from fastgen.pipeline.offline import padded
from fastgen.pipeline.transformers import allowed_outputs, prepare, tokenizing
from fastgen.pipeline.transformers.growing_text import settled
from fastgen.pipeline.transformers.load import generation_config, load_model
from fastgen.pipeline.transformers.settings import RunSettings


def run(settings: RunSettings, warn: Callable[[str], None]) -> int:
    """Answer each line of standard input by a line of standard output; returns the exit code.

    Raises InputError for settings, or a line, that can't be used.
    """
    known = prepare.prepared(settings, warn)
    model = load_model(settings.model, known.config, settings.dtype, known.device)
    config = generation_config(model, known.tokenizer, known.given, known.language)
    if int(config.num_return_sequences or 1) > 1:
        raise InputError("--stream writes one line for each input: leave out --num-return-sequences.")
    torch.manual_seed(settings.seed)
    options = {"generation_config": config} | ({"tokenizer": known.tokenizer} if config.stop_strings else {})
    if settings.allowed_outputs is not None:
        options["prefix_allowed_tokens_fn"] = allowed_outputs.load(
            settings.allowed_outputs, known.tokenizer, settings.target_lang, model, config
        )
    answer = _Answers(model, options, known.tokenizer, known.spec, known.limit)
    growing_line.answer_lines(answer.pieces)
    return DONE


class _Answers:
    """Generates for one line at a time."""

    def __init__(
        self, model: Any, options: dict[str, Any], tokenizer: Any, spec: tokenizing.TokenizerSpec, limit: int | None
    ) -> None:
        """`options`: of `generate`; `spec`: how the tokenizer is used; `limit`: most tokens of a line."""
        self._model, self._options, self._tokenizer, self._limit = model, options, tokenizer, limit
        self._handle = tokenizing.handler(tokenizer, spec)

    def pieces(self, number: int, text: str) -> Iterable[str]:
        """The pieces of the answer to line `number`.

        A word comes with the space before it: a tokenizer may still change the space after the last one.
        """
        if number == 1:
            text = text.removeprefix("\ufeff")  # a byte order mark
        if not text.strip():
            return ()
        (tokens,) = self._handle(tokenizing.Encode([text]))
        if self._limit is not None and len(tokens) > self._limit:
            has = counted(len(tokens), "token")
            raise InputError(f"Line {number} has {has}, and the model has room for {self._limit}: --truncate cuts it.")
        inputs = padded(self._model, [list(tokens)], self._options)
        stream = streams.stream(self._model, (), inputs)
        return growing_line.grown(stream, self._decoded, lambda text: settled(text, self._tokenizer))

    def _decoded(self, tokens: list[int]) -> str:
        (text,) = self._handle(tokenizing.Decode([tokens]))
        return growing_line.in_one_line(str(text))
