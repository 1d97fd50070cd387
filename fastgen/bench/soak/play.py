"""One case: the calls of a model on stock and on fastgen, each on a model of its own, with the same edits between."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fastgen
from fastgen import report
from fastgen.bench.soak.edits import edited
from fastgen.bench.soak.models import built, inputs_of
from fastgen.bench.soak.modes import MODES, Mode
from fastgen.optimizer.transformers.judge import DIFFERENT as DIFFERENT  # for the script
from fastgen.optimizer.transformers.judge import HALF_TOLERANCE, Verdict, judged


@dataclass(frozen=True)
class Played:
    """What became of one call."""

    number: int
    verdict: Verdict
    calls: tuple[report.Call, ...]  # fastgen's, of the first try
    failed: bool  # stock raised an error


def played(case: dict[str, Any]) -> Iterator[Played]:
    """Call by call."""
    threads, mode = torch.get_num_threads(), MODES[case["mode"]]
    try:
        with warnings.catch_warnings(), fastgen.configured(strict=False, **case["settings"]):
            warnings.simplefilter("ignore")
            with mode.entered() if mode.is_born_inside else contextlib.nullcontext():
                stock = built(case["model"]).to(case["device"], getattr(torch, case["dtype"]))
                ours = copy.deepcopy(stock)
            for number, call in enumerate(case["calls"]):
                yield _played(number, call, _mode_of(mode, number), stock, ours)
    finally:
        torch.set_num_threads(threads)


def _mode_of(mode: Mode, number: int) -> Mode:
    return MODES["plain"] if mode.is_left_between and number % 2 else mode


def _played(number: int, call: dict[str, Any], mode: Mode, stock: Any, ours: Any) -> Played:
    inside = mode.entered if mode.is_born_inside else contextlib.nullcontext
    with inside():
        for edit in call["edits"]:
            edited(stock, edit)
            edited(ours, edit)
        inputs = {name: value.to(stock.device) for name, value in inputs_of(stock, call["inputs"]).items()}
    generate = mode.wrapped(generated)
    seen: list[tuple[report.Call, ...]] = []
    failed: list[bool] = []

    def by_host(model: Any, **more: Any) -> Any:
        with fastgen.disabled(), mode.entered():
            torch.manual_seed(call["seed"])
            return generate(model, copy.deepcopy(inputs), **{**copy.deepcopy(call["options"]), **more})

    def by_host_in_float64(**more: Any) -> Any:
        return by_host(copy.deepcopy(stock).double(), **more)

    def by_stock(**more: Any) -> Any:
        failed.append(True)
        result = by_host(stock, **more)
        failed.pop()
        return result

    def by_fastgen(**more: Any) -> Any:
        report.reset()
        try:
            with mode.entered():
                torch.manual_seed(call["seed"])
                return generate(ours, copy.deepcopy(inputs), **{**copy.deepcopy(call["options"]), **more})
        finally:
            seen.append(report.calls())

    beams = call["options"]["num_beams"]
    half = str(ours.dtype).removeprefix("torch.")
    half = half if half in HALF_TOLERANCE else mode.half
    verdict = judged(by_stock, by_fastgen, beams, half, by_host_in_float64)
    return Played(number, verdict, seen[0], bool(failed))


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """The user's call."""
    return model.generate(**inputs, **options)
