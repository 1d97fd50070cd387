"""One job decoded by stock and by fastgen, in turn."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import fastgen
from fastgen.memory.peak import PeakMemory
from fastgen.pipeline.errors import counted
from fastgen.pipeline.transformers.hypotheses import without_tail

SIDES = ("stock", "fastgen")
_WARM_UP_TOKENS = 8
_HISTORY = 10_000  # calls of one batch that are remembered: a long recording has one for every 30 seconds


class Work(ABC):
    """What both sides decode, batch by batch, and how it is called on the page."""

    host: str  # whose code stock is
    call: str  # of the host's, which is timed
    inputs: str  # what they are
    memory_part: str  # what peak memory is measured on
    name: str  # of the model
    model: Any
    sources: list[str]
    answers: list[str] | None  # the right ones, if they are known
    beams: int

    @abstractmethod
    def shape(self) -> str:
        """The inputs and options, in words."""

    @abstractmethod
    def amount(self) -> tuple[str, float]:
        """What a side's speed counts, and how much of it there is."""

    @abstractmethod
    def batches(self) -> list[Any]:
        """In the order of the sources."""

    @abstractmethod
    def warm_up(self) -> None:
        """A little of the work, for what only first calls do."""

    @abstractmethod
    def generate(self, batch: Any) -> Any:
        """What the user's script does; the same on both sides."""

    @abstractmethod
    def new_tokens(self, batch: Any, output: Any) -> list[list[int]]:
        """The tokens of each source of the batch."""

    @abstractmethod
    def texts(self, tokens: list[list[int]]) -> list[str]:
        """The tokens of each source, as text."""

    @abstractmethod
    def for_memory(self, batches: list[Any], longest: int) -> Any:
        """The batch that peak memory is measured on; `longest`: the source with the longest output."""


@dataclass(frozen=True)
class Job(Work):
    """Texts to decode with a model of transformers, and the right answers if they are known."""

    name: str
    model: Any
    tokenizer: Any
    sources: list[str]
    answers: list[str] | None
    beams: int
    batch_size: int
    max_new_tokens: int
    max_source: int | None  # longer inputs are cut

    host = "transformers"
    call = "generate()"
    inputs = "inputs"
    memory_part = "one batch, the one with the longest output"

    @property
    def causal(self) -> bool:
        return not self.model.config.is_encoder_decoder

    def shape(self) -> str:
        return (
            f"{counted(len(self.sources), 'input')}, {counted(self.beams, 'beam')}, batches of {self.batch_size}, "
            f"at most {self.max_new_tokens} new tokens"
        )

    def amount(self) -> tuple[str, float]:
        return "inputs", len(self.sources)

    def batches(self) -> list[dict[str, Any]]:
        """Token ids and masks, in the order of the input."""
        cut = {} if self.max_source is None else {"truncation": True, "max_length": self.max_source}
        encoded = []
        for start in range(0, len(self.sources), self.batch_size):
            texts = self.sources[start : start + self.batch_size]
            batch = self.tokenizer(texts, return_tensors="pt", padding=True, **cut)
            wanted = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            encoded.append(wanted)
        return encoded

    def warm_up(self) -> None:
        self.generate(self.batches()[0], min(_WARM_UP_TOKENS, self.max_new_tokens))

    def generate(self, batch: dict[str, Any], max_new_tokens: int | None = None) -> Any:
        return self.model.generate(
            **batch,
            num_beams=self.beams,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            do_sample=False,
            num_return_sequences=1,
        )

    def new_tokens(self, batch: dict[str, Any], output: Any) -> list[list[int]]:
        """Each row's generated tokens, without the prompt and without padding at the end."""
        rows = output[:, batch["input_ids"].shape[1] :] if self.causal else output
        pad = self.tokenizer.pad_token_id
        return [without_tail(row, pad) for row in rows.tolist()]

    def texts(self, tokens: list[list[int]]) -> list[str]:
        found: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return found

    def for_memory(self, batches: list[Any], longest: int) -> Any:
        return batches[longest // self.batch_size]


@dataclass
class Side:
    """What one side did."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int | None = None
    texts: list[str] = field(default_factory=list)


@dataclass
class Result:
    job: Work
    sides: dict[str, Side]
    tiers: Counter[tuple[str, str | None]]  # (tier, reason) of every call of the host's on fastgen's side

    @property
    def identical(self) -> int:
        pairs = zip(self.sides["stock"].tokens, self.sides["fastgen"].tokens, strict=True)
        return sum(stock == ours for stock, ours in pairs)

    @property
    def all_identical(self) -> bool:
        return self.identical == len(self.job.sources)

    @property
    def speed_up(self) -> float:
        return self.sides["stock"].seconds / self.sides["fastgen"].seconds


def compare(job: Work, *, progress: bool = True) -> Result:
    """Warm up, time both sides batch by batch in alternating order, then measure memory on one batch."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    batches = job.batches()
    result = Result(job, {name: Side() for name in SIDES}, Counter())
    for name in SIDES:
        with _running(name):
            job.warm_up()
    bar = tqdm(total=2 * len(job.sources), unit=job.inputs, disable=not progress, leave=True)
    with bar:
        for number, batch in enumerate(batches):
            for name in SIDES if number % 2 == 0 else SIDES[::-1]:
                bar.set_description(f"{name:>7}")
                bar.update(_decode(job, batch, name, result))
    longest = max(range(len(job.sources)), key=lambda i: len(result.sides["stock"].tokens[i]))
    heaviest = job.for_memory(batches, longest)
    for name in SIDES:
        with _running(name), PeakMemory(job.model.device) as memory:
            job.generate(heaviest)
        result.sides[name].peak_bytes = memory.bytes
    for side in result.sides.values():
        side.texts = job.texts(side.tokens)
    return result


def _decode(job: Work, batch: Any, name: str, result: Result) -> int:
    """Decode a batch on one side; returns of how many sources it was."""
    side = result.sides[name]
    with _running(name):
        before = sum(fastgen.status().counters.values())
        _synchronize(job.model.device)
        started = time.perf_counter()
        output = job.generate(batch)
        _synchronize(job.model.device)
        side.seconds += time.perf_counter() - started
        after = fastgen.status()
    if new := sum(after.counters.values()) - before:
        result.tiers.update((call.tier, call.reason) for call in after.calls[-new:])
    found = job.new_tokens(batch, output)
    side.tokens += found
    return len(found)


def _running(name: str) -> contextlib.AbstractContextManager[Any]:
    return fastgen.disabled() if name == "stock" else fastgen.configured(weights="float32", history=_HISTORY)


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
