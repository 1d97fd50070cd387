"""`fastgen-bench soak`: random cases, one after the other, until time or count is up or an output differs."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from fastgen.bench.soak.cases import drawn_case
from fastgen.bench.soak.play import Played, played
from fastgen.bench.soak.script import script
from fastgen.optimizer.transformers import judge


@dataclass
class Counts:
    """What a soak has come to."""

    cases: int = 0
    calls: int = 0
    errors: int = 0  # that stock raised, and fastgen alike
    near_ties: int = 0  # in single precision
    rounding: int = 0  # calls beyond the tolerances, with scores at most twice as wrong as stock's
    half: int = 0  # calls in half precision whose tokens part, with logits of the same tokens within the tolerance
    tiers: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def add(self, call: Played) -> None:
        self.calls += 1
        self.errors += call.failed
        self.rounding += call.verdict.kind == judge.ROUNDING
        is_tie = call.verdict.kind == judge.NEAR_TIE
        self.half += is_tie and call.verdict.why.startswith(judge.BY_LOGITS)
        self.near_ties += is_tie and not call.verdict.why.startswith(judge.BY_LOGITS)
        for each in call.calls:
            self.tiers[each.tier] += 1
            if each.tier == "stock":
                self.reasons[each.reason or "no reason"] += 1

    def __str__(self) -> str:
        rate = self.cases / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.cases} cases in {self.seconds:.0f} s ({rate:.2f} a second), {self.calls} calls of generate",
            f"accelerated: {self.tiers['fast']} fast, {self.tiers['compat']} compat; stock: {self.tiers['stock']}",
            *(f"  {count:6} {reason}" for reason, count in self.reasons.most_common()),
            f"errors, the same on both: {self.errors}",
            f"near-ties: {self.near_ties}",
            f"rounding, with scores at most twice as far from those in float64 as stock's: {self.rounding}",
            f"parted in half precision, with stock's logits for the same tokens: {self.half}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    case: dict[str, Any]
    call: Played

    def __str__(self) -> str:
        mode, family = self.case["mode"], self.case["model"]["family"]
        where = (
            f"case {self.case['number']} of seed {self.case['seed']} ({family}, mode {mode}), call {self.call.number}"
        )
        return f"{where}: {self.call.verdict.why}"


def soak(
    draw: Callable[[int], dict[str, Any]],
    first: int,
    count: int | None,
    seconds: float | None,
    say: Callable[[Counts], None] = lambda _: None,
) -> tuple[Counts, Difference | None]:
    """Play the cases that `draw` makes of numbers from `first` on: `count` of them, or for so many seconds, or until an
    output differs."""
    counts, start, number = Counts(), time.monotonic(), first
    while (count is None or number < first + count) and (seconds is None or counts.seconds < seconds):
        case = draw(number)
        for call in played(case):
            counts.add(call)
            if call.verdict.kind == judge.DIFFERENT:
                return counts, Difference(case, call)
        number += 1
        counts.cases, counts.seconds = counts.cases + 1, time.monotonic() - start
        say(counts)
    return counts, None


def run(
    seed: int,
    first: int,
    count: int | None,
    minutes: float | None,
    output: Path,
    quiet: bool,
    device: str = "cpu",
    dtype: str = "float32",
) -> bool:
    """The command; whether all outputs were the same."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    bar = _Bar(count, minutes, quiet)
    seconds = None if minutes is None else 60 * minutes
    counts, found = soak(lambda number: drawn_case(seed, number, device, dtype), first, count, seconds, bar)
    bar.clear()
    print(f"seed {seed}, cases from {first} on\n{counts}")
    if found is None:
        return True
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"soak-{seed}-{found.case['number']}.py"
    path.write_text(script(found.case, str(found), torch.get_num_threads()), "utf-8")
    print(f"{path}\n{found}")
    return False


class _Bar:
    """How far the soak is, in one line of standard error."""

    def __init__(self, count: int | None, minutes: float | None, quiet: bool) -> None:
        self._count, self._minutes, self._shown = count, minutes, not quiet and sys.stderr.isatty()

    def __call__(self, counts: Counts) -> None:
        if self._shown:
            done = counts.cases / self._count if self._count else counts.seconds / (60 * (self._minutes or 1))
            bar = ("#" * int(30 * min(done, 1))).ljust(30, ".")
            text = f"[{bar}] {counts.cases} cases, {counts.calls} calls, {counts.near_ties} near-ties"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
