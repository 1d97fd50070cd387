"""What a run of `fastgen-bench` writes: one JSON document, of which the report and the comparison are made."""

from __future__ import annotations

import types
import typing
from typing import Any, TypedDict

FORMAT = 1


class Ratio(TypedDict):
    """The reference's seconds / a side's, of each round: above 1 the side is faster."""

    median: float
    min: float
    max: float


class _Compared(TypedDict):
    against: str  # that side
    outputs: int
    different: list[int]  # numbers of the outputs that differ in one token or more
    same_tokens: float  # the part of the other side's tokens that have the same token in the same place
    must: bool  # a difference is a failure: fastgen's sides


class Verified(_Compared, total=False):
    """A side's outputs beside those of the side it must, or should, equal."""

    near_ties: list[int]  # outputs that differ, but are the other side's once rounding moves its weights: no failure


class Result(TypedDict, total=False):
    """A side of a task."""

    refused: str  # why it cannot do this task, or could not go on
    missing: bool  # because it is not installed
    verified: Verified  # of all but the sides that others are compared with
    seconds: float  # median of the rounds
    first_seconds: float  # the first call: warm-up, compilation and recording among it
    ratio: Ratio
    cache_bytes: int | None  # keys and values, or what stands for them, at their largest
    peak_bytes: int | None  # memory of the first call, above what the process held before it
    resident_bytes: int | None  # all that the process held then, weights and libraries among it
    tiers: dict[str, int]  # fastgen's calls by tier
    phases: dict[str, float]  # seconds by name of PHASES, of a call of its own, and their sum as "total"
    metrics: dict[str, float]  # quality, by name: BLEU, chrF, ...
    counts: dict[str, int]  # operators called, allocations and their bytes: with --counts


class Round(TypedDict):
    seconds: dict[str, float]  # by side
    other_processes: dict[str, float | None]  # cores that they kept busy meanwhile


class _Named(TypedDict):
    name: str
    sides: dict[str, Result]  # in the order in which they are shown


class Task(_Named, total=False):
    what: str  # in words
    weights: str  # "random" or "trained"
    options: dict[str, Any]  # of generation
    shape: dict[str, int]  # batch, beams, source, new: what is known of them
    axis: str  # of a grid or a curve: the name in `shape` that varies along it ...
    line: str  # ... and what the others have in common
    reference: str  # the side that ratios are of
    rounds: list[Round]


class Side(TypedDict):
    label: str
    settings: list[str]  # how it is configured, one statement each
    lossy: bool  # not the same numbers as float32's: int8, bf16
    versions: dict[str, str]


class Section(TypedDict):
    """A table or figure of the suite."""

    title: str
    text: str  # what it shows, and what weights it is of
    tasks: list[str]
    show: list[str]  # of "ratios", "lines", "phases", "memory", "seconds", "metrics", "outputs"


class _Provenance(TypedDict, total=False):
    commit: str  # of fastgen's checkout, with "-dirty" where files differed from it


class Document(_Provenance):
    fastgen_bench: int  # FORMAT
    suite: str
    command: str
    date: str  # ISO 8601
    machine: dict[str, Any]  # cpu, cores, threads, memory_bytes, system, device (the GPU's name or "cpu")
    versions: dict[str, str]
    settings: dict[str, Any]  # rounds, threads, device, dtype, quick, pause_seconds
    statements: list[str]  # how the measuring is done, the same for all sides
    sides: dict[str, Side]
    sections: list[Section]
    tasks: list[Task]


_BUILT_IN = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "a yes or no",
    dict: "an object",
    list: "a list",
}


def problem(value: Any, kind: Any, where: str = "") -> str:
    """What of `value`, as JSON has it, is not of the type `kind`: a sentence without its end, or ""."""
    if typing.is_typeddict(kind):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no object"
        hints = typing.get_type_hints(kind)
        if missing := [name for name in kind.__required_keys__ if name not in value]:
            return f"{where or 'it'} has no {', '.join(sorted(missing))}"
        parts = ((value[name], hint, f"{where}.{name}".strip(".")) for name, hint in hints.items() if name in value)
    elif kind is Any:
        return ""
    elif isinstance(kind, types.UnionType):
        return "" if not all(problem(value, one, where) for one in typing.get_args(kind)) else f"{where} is wrong"
    elif kind is types.NoneType:
        return "" if value is None else f"{where} is not null"
    else:
        outer, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
        fits = isinstance(value, (int, float) if outer is float else outer)
        if not fits or (isinstance(value, bool) and outer is not bool):
            return f"{where} is not {_BUILT_IN[outer]}"
        each = value.items() if outer is dict else enumerate(value) if outer is list else ()
        parts = ((one, inner[-1], f"{where}.{name}") for name, one in each)
    return next((found for one, hint, place in parts if (found := problem(one, hint, place))), "")
