"""One job decoded by stock and by fastgen, in turn."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import fastgen
from fastgen.memory.peak import PeakMemory
from fastgen.pipeline.transformers.hypotheses import without_tail

SIDES = ("stock", "fastgen")
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """What to decode, and the right answers if they are known."""

    name: str
    model: Any
    tokenizer: Any
    sources: list[str]
    answers: list[str] | None
    beams: int
    batch_size: int
    max_new_tokens: int
    max_source: int | None  # longer inputs are cut

    @property
    def causal(self) -> bool:
        return not self.model.config.is_encoder_decoder

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

    def generate(self, batch: dict[str, Any], max_new_tokens: int | None = None) -> Any:
        """What the user's script does; the same on both sides."""
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


@dataclass
class Side:
    """What one side did."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int | None = None
    texts: list[str] = field(default_factory=list)


@dataclass
class Result:
    job: Job
    sides: dict[str, Side]
    tiers: Counter[tuple[str, str | None]]  # (tier, reason) of every beam search on fastgen's side

    @property
    def identical(self) -> int:
        pairs = zip(self.sides["stock"].tokens, self.sides["fastgen"].tokens, strict=True)
        return sum(stock == ours for stock, ours in pairs)

    @property
    def speed_up(self) -> float:
        return self.sides["stock"].seconds / self.sides["fastgen"].seconds


def compare(job: Job, *, progress: bool = True) -> Result:
    """Warm up, time both sides batch by batch in alternating order, then measure memory on one batch."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    batches = job.batches()
    result = Result(job, {name: Side() for name in SIDES}, Counter())
    for name in SIDES:
        with _running(name):
            job.generate(batches[0], min(_WARM_UP_TOKENS, job.max_new_tokens))
    bar = tqdm(total=2 * len(job.sources), unit="inputs", disable=not progress, leave=True)
    with bar:
        for number, batch in enumerate(batches):
            for name in SIDES if number % 2 == 0 else SIDES[::-1]:
                bar.set_description(f"{name:>7}")
                _decode(job, batch, name, result)
                bar.update(len(batch["input_ids"]))
    longest = max(range(len(job.sources)), key=lambda i: len(result.sides["stock"].tokens[i]))
    for name in SIDES:
        with _running(name), PeakMemory(job.model.device) as memory:
            job.generate(batches[longest // job.batch_size])
        result.sides[name].peak_bytes = memory.bytes
    for side in result.sides.values():
        side.texts = job.tokenizer.batch_decode(side.tokens, skip_special_tokens=True)
    return result


def _decode(job: Job, batch: dict[str, Any], name: str, result: Result) -> None:
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
    side.tokens += job.new_tokens(batch, output)


def _running(name: str) -> contextlib.AbstractContextManager[Any]:
    return fastgen.disabled() if name == "stock" else fastgen.configured(weights="float32")


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
