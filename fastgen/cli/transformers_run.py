"""What fastgen-generate-transformers does with transformers: load, batch by length, generate."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from fastgen.cli import tokenizing
from fastgen.cli.records import Record
from fastgen.pipeline.batching import AutoBatch, is_out_of_memory, memory_for_double, run_with_backoff
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.workers import WorkerPool

AUTO_SENTENCES = 4
AUTO_TOKENS = 256
WINDOW = 4096  # records that are sorted by length together
ENCODE = 64  # records that a worker tokenises at once

_UNLOADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    ImportError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)


def load_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name)
    except _UNLOADABLE as error:
        raise InputError(f"Cannot load the model {name!r}: {first_line(error)}.") from error


def load_model(name: str, config: Any, dtype: str, device: str) -> Any:
    """The model as its config says, seq2seq or causal, ready to generate."""
    from safetensors import SafetensorError

    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(name, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
        return model.to(device).eval()
    except (*_UNLOADABLE, SafetensorError) as error:
        raise InputError(f"Cannot load the model {name!r}: {first_line(error)}.") from error


def source_limit(config: Any, tokenizer: Any, new_tokens: int) -> int | None:
    """How many tokens of input the model and the tokenizer have room for; None: no limit known."""
    limits = [] if tokenizer.model_max_length > 10**9 else [int(tokenizer.model_max_length)]
    if positions := getattr(config, "max_position_embeddings", None):
        limits.append(positions if config.is_encoder_decoder else positions - new_tokens)
    return min(limits, default=None)


def generation_config(model: Any, tokenizer: Any, flags: dict[str, Any], language: int | None) -> GenerationConfig:
    """The model's own, with the user's flags over it."""
    try:
        merged = GenerationConfig.from_dict({**model.generation_config.to_dict(), **flags})
    except (ValueError, TypeError) as error:
        raise InputError(f"transformers refuses these flags: {first_line(error)}.") from error
    if language is not None and "forced_bos_token_id" not in flags:
        merged.forced_bos_token_id = language
    if merged.pad_token_id is None:
        merged.pad_token_id = pad_token(tokenizer, model)
    if "max_new_tokens" in flags and "max_length" not in flags:
        merged.max_length = None  # else both are given, and transformers warns at every batch
    return merged


def pad_token(tokenizer: Any, model: Any) -> int:
    """Any token will do where there is none for padding: the mask hides it."""
    for candidate in (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


@dataclass
class Batch:
    """Records that are generated together; those with an error only pass through."""

    records: list[Record]
    number: int  # the least index: seeds the sampling


@dataclass
class Source:
    """Reads and tokenises windows of records in the reading thread; `cut` makes batches of them in the calling one."""

    records: Iterator[Record]
    pool: WorkerPool
    limit: int | None
    fixed: int  # the size of a batch without `auto`
    auto: AutoBatch | None
    by_tokens: bool  # sizes are padded tokens, not records
    stop_at_error: bool
    finished: set[int] = field(default_factory=set)  # records that an earlier run did
    first: int = 0  # a multiple of WINDOW

    def __iter__(self) -> Iterator[list[Record]]:
        records = islice(self.records, self.first, None)
        while window := list(islice(records, WINDOW)):
            self._encode(window)
            yield window

    def cut(self, window: list[Record]) -> Iterator[Batch]:
        """Batches of records of like length, without those that an earlier run did."""
        broken = next((record for record in window if record.error is not None), None)
        if broken is not None and self.stop_at_error:
            window = window[: window.index(broken)]
        failed = [record for record in window if record.error is not None and record.index not in self.finished]
        if failed:
            yield Batch(failed, failed[0].index)
        yield from self._batches([record for record in window if record.error is None])
        if broken is not None and self.stop_at_error:
            raise InputError(str(broken.error))

    def _encode(self, window: list[Record]) -> None:
        usable = [record for record in window if record.error is None]
        parts = [usable[start : start + ENCODE] for start in range(0, len(usable), ENCODE)]
        encoded = [self.pool.submit(tokenizing.Encode([record.text for record in part])) for part in parts]
        for part, tokens in zip(parts, encoded, strict=True):
            for record, ids in zip(part, tokens.result(), strict=True):
                record.tokens = list(ids)
                if self.limit is not None and len(ids) > self.limit:
                    record.refuse(f"{len(ids)} tokens, and the model has room for {self.limit}; --truncate cuts it")
                elif not ids:
                    record.refuse("the text has no tokens")

    def _batches(self, records: list[Record]) -> Iterator[Batch]:
        # The longest first: what doesn't fit into memory shows at once. The order of the input breaks ties.
        records = sorted(records, key=lambda record: -len(record.tokens))
        if self.auto is not None:
            records = [record for record in records if record.index not in self.finished]
        position = 0
        while position < len(records):
            batch = self._take(records, position)
            position += len(batch)
            if any(record.index not in self.finished for record in batch):
                yield Batch(batch, min(record.index for record in batch))

    def _take(self, records: Sequence[Record], position: int) -> list[Record]:
        size = self.fixed if self.auto is None else self.auto.size
        longest = len(records[position].tokens) if self.by_tokens else 1
        return list(records[position : position + max(1, size // longest)])

    def units(self, records: Sequence[Record]) -> int:
        return len(records) * (max(len(record.tokens) for record in records) if self.by_tokens else 1)


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
    ) -> None:
        self._model, self._config, self._source = model, config, source
        self._seed, self._scores, self._warn = seed, scores, warn
        self.per_record = int(config.num_return_sequences or 1)

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
        if self._source.auto is not None:
            self._source.auto.failed(self._source.units(part))
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
        if self._source.auto is not None:
            work = sum(len(record.tokens) for record in records) + sum(map(len, rows))
            self._source.auto.succeeded(self._source.units(records), work / (time.perf_counter() - started))
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
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=self._config,
                return_dict_in_generate=self._scores,
                output_scores=self._scores,
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


def auto_batch(device: str, *, by_tokens: bool) -> AutoBatch:
    kind = torch.device(device).type
    return AutoBatch(
        AUTO_TOKENS if by_tokens else AUTO_SENTENCES,
        by_speed=kind == "cpu",
        fits=lambda: memory_for_double(kind),
    )


def nothing() -> Future[list[str]]:
    """The future of a batch that has nothing to detokenise."""
    future: Future[list[str]] = Future()
    future.set_result([])
    return future
