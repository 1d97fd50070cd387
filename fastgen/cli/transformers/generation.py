"""From batches of records to tokens and scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from fastgen.cli.transformers.batches import Batch, Source
from fastgen.cli.transformers.records import Record
from fastgen.pipeline.batching import is_out_of_memory, run_with_backoff
from fastgen.pipeline.errors import InputError, first_line


@dataclass
class Hypotheses:
    """Tokens of every hypothesis of a batch, record after record, and their scores."""

    rows: list[list[int]]
    scores: list[float | None]
    tokens: int


class Generator:
    """Generates batches, in smaller parts where memory runs out."""

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        source: Source,
        *,
        seed: int,
        scores: bool,
        warn: Callable[[str], None],
        tokenizer: Any = None,
    ) -> None:
        """`tokenizer` is needed for `stop_strings` alone."""
        self._model, self._config, self._source = model, config, source
        self._seed, self._scores, self._warn = seed, scores, warn
        self._stopping = {"tokenizer": tokenizer} if config.stop_strings else {}
        self.per_record = int(config.num_return_sequences or 1)
        # Else the log-probabilities of all tokens would be kept at each step: 64 MB for 64 sentences and 5 beams.
        config._fastgen_sequence_scores_only = scores

    def __call__(self, batch: Batch) -> Hypotheses:
        """All hypotheses of `batch`; a record that doesn't fit into memory alone gets its `error` set, and none."""
        if self._config.do_sample:
            # By batch, not by run: a run that is resumed draws the same numbers.
            torch.manual_seed(((self._seed << 32) + batch.number) % 2**63)
        found = run_with_backoff(batch.records, self._run, self._out_of_memory)
        rows = [row for rows, _ in found for row in rows]
        scores = [score for _, scores in found for score in scores]
        pad = self._config.pad_token_id
        return Hypotheses(rows, scores, sum(len(row) - row.count(pad) for row in rows))

    def _out_of_memory(self, part: Sequence[Record]) -> None:
        self._source.failed(part)
        self._warn(f"out of memory with {len(part)} records in a batch: going on with halves")

    def _run(self, records: Sequence[Record]) -> list[tuple[list[list[int]], list[float | None]]]:
        started = time.perf_counter()
        try:
            rows, scores = self._generate(records)
        except ValueError as error:  # transformers refuses a combination of flags
            raise InputError(f"transformers refuses to generate: {first_line(error)}.") from error
        except (MemoryError, RuntimeError) as error:
            if len(records) > 1 or not is_out_of_memory(error):
                raise
            records[0].refuse("out of memory, even alone in its batch")
            if self._source.stop_at_error:
                raise InputError(str(records[0].error)) from error
            return [([], [])]
        work = sum(len(record.tokens) for record in records) + sum(map(len, rows))
        self._source.succeeded(records, work / (time.perf_counter() - started))
        n = self.per_record
        return [(rows[k * n : (k + 1) * n], scores[k * n : (k + 1) * n]) for k in range(len(records))]

    def _generate(self, records: Sequence[Record]) -> tuple[list[list[int]], list[float | None]]:
        model = self._model
        causal = not model.config.is_encoder_decoder
        pad = self._config.pad_token_id
        longest = max(len(record.tokens) for record in records)
        ids = torch.full((len(records), longest), pad)  # [B, N]
        mask = torch.zeros_like(ids)
        for row, record in enumerate(records):
            # A causal model goes on from the last position: its padding is on the left.
            place = slice(longest - len(record.tokens), None) if causal else slice(len(record.tokens))
            ids[row, place] = torch.tensor(record.tokens)
            mask[row, place] = 1
        with torch.no_grad():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=self._config,
                return_dict_in_generate=self._scores,
                output_scores=self._scores,
                **self._stopping,
            )
        sequences = output.sequences if self._scores else output
        new = sequences[:, longest:] if causal else sequences
        rows = [_without_tail(row, pad) for row in new.tolist()]
        return rows, self._score(output) if self._scores else [None] * len(rows)

    def _score(self, output: Any) -> list[float | None]:
        """The search's own score; without beams the sum of the log-probabilities of the tokens."""
        scores = getattr(output, "sequences_scores", None)
        if scores is None:
            steps = self._model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
            # After its end a row is padding, whose probabilities don't count.
            ends = torch.tensor(_ends(self._config.eos_token_id), device=steps.device)
            ended = torch.isin(output.sequences[:, -steps.shape[1] :], ends).cumsum(-1)  # [B, T]
            after = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=-1) > 0
            scores = steps.masked_fill(after, 0.0).sum(-1)
        return [float(score) for score in scores.tolist()]


def _ends(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _without_tail(row: list[int], pad: int) -> list[int]:
    end = len(row)
    while end and row[end - 1] == pad:
        end -= 1
    return row[:end]
