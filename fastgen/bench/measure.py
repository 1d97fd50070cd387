"""One task: every side in a process of its own, outputs compared first, then timed in turn."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastgen.bench import document, models, quality
from fastgen.bench.child import Child
from fastgen.bench.machine import OtherProcesses
from fastgen.bench.runners import Refused
from fastgen.bench.sides import SIDES, Side
from fastgen.bench.tasks import Task

# Threads of one side spin for some milliseconds (OpenMP) when they have nothing left to do; the next side waits for it.
PAUSE = 0.5
SHORTEST = 0.5  # seconds of a turn: a shorter call is repeated
HOSTS = ("transformers", "fairseq")  # runners whose insides can be seen: phases and counts
SCORES = 1e-4  # how far scores of equal hypotheses may be apart

STATEMENTS = [
    "Every side is a process of its own, started by one parent, which keeps them waiting while another one works.",
    "Random models are built by every side from the same seed, trained ones loaded from the same files: same weights.",
    "All sides get the same inputs in the same batches. Random models generate a fixed number of tokens (the least is "
    "the most), so all do the same work; trained ones end by themselves.",
    "Every side decodes everything once before the clock: its outputs are compared, and it warms up, compiles and "
    "records. A side of fastgen whose outputs are not stock's, token for token, is not timed, nor one that would "
    "fall back to stock.",
    "In each round the sides take turns, each with all threads for itself, and the side that goes first changes. "
    f"Between turns nothing runs for {PAUSE} s. Calls shorter than {SHORTEST} s are repeated and their mean taken.",
    "A ratio is the reference's seconds divided by the side's in the same round; shown are the median of the rounds, "
    "the least and the largest. Loading, converting and starting processes are not timed.",
    "Memory is what a process held at most in its first call beyond what it held before: keys and values, buffers, "
    "temporaries and, for fastgen, packed copies of weights. Caches are keys and values alone, as allocated.",
]


@dataclass(frozen=True)
class Settings:
    rounds: int = 5
    threads: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    folders: models.Folders = field(default_factory=dict)
    counts: bool = False  # instead of time


Say = Callable[[str], None]


def run(task: Task, settings: Settings, show: list[str], say: Say) -> tuple[document.Task, dict[str, dict[str, str]]]:
    """The task's part of the document, and the versions of what its sides ran; `show` is its section's."""
    results: dict[str, document.Result] = {name: {} for name in task.sides}
    rounds: list[document.Round] = []
    with _children(task, settings, results, say) as children:
        tokens = _compare(task, children, results, say)
        if "metrics" in show:
            for name, found in tokens.items():
                results[name]["metrics"] = quality.metrics(task.as_dict(), settings.folders, found)
        timed = {name: child for name, child in children.items() if not _is_wrong(results[name])}
        if settings.counts:
            for name, child in timed.items():
                if SIDES[name].runner in HOSTS:
                    results[name]["counts"] = child.counts()
        elif task.reference in timed:
            rounds = list(_rounds(task.rounds or settings.rounds, timed, say))
        if "phases" in show and not settings.counts:
            for name, child in timed.items():
                if SIDES[name].runner in HOSTS:
                    say(f"{name}: phases")
                    results[name]["phases"] = _phases(name, child, task, settings)
        versions = {name: child.versions for name, child in children.items()}
    _summarise(task.reference, rounds, results)
    measured: document.Task = {
        "name": task.name,
        "what": task.what,
        "weights": "trained" if task.model in models.TRAINED else "random",
        "options": task.options,
        "shape": task.shape,
        "reference": task.reference,
        "sides": results,
        "rounds": rounds,
    }
    if task.axis:
        measured["axis"], measured["line"] = task.axis, task.line
    return measured, versions


@contextlib.contextmanager
def _children(
    task: Task, settings: Settings, results: dict[str, document.Result], say: Say
) -> Iterator[dict[str, Child]]:
    """A process for each side that can do the task; why another can't stands in its result."""
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastgen-bench-"))

        def start(side: Side, runner: str) -> Child:
            child = Child(_order(side, runner, task, settings, folder), side.environment)
            stack.callback(child.close)
            return child

        say("loading")
        for name in task.sides:  # they load at the same time
            if SIDES[name].runner != "ctranslate2":
                children[name] = start(SIDES[name], SIDES[name].runner)
        engines = [name for name in task.sides if SIDES[name].runner == "ctranslate2"]
        if engines:
            why = _why_not(start(SIDES[engines[0]], "convert"))
            for name in engines:
                if why:
                    results[name]["refused"] = why
                else:
                    children[name] = start(SIDES[name], "ctranslate2")
        for name in list(children):
            if why := _why_not(children[name]):
                results[name]["refused"] = why
                del children[name]  # closed with the others
        yield {name: children[name] for name in task.sides if name in children}


def _why_not(child: Child) -> str:
    """Why a side can't do the task; "" if it is ready."""
    try:
        child.load()
    except Refused as error:
        return str(error)
    return ""


def _phases(name: str, child: Child, task: Task, settings: Settings) -> dict[str, float]:
    """On a GPU by a process of its own, in which every operator is waited for: else its time falls in a later phase."""
    if settings.device == "cpu":
        return child.phases()
    environment = SIDES[name].environment | {"CUDA_LAUNCH_BLOCKING": "1"}
    waiting = Child(_order(SIDES[name], SIDES[name].runner, task, settings, ""), environment)
    try:
        waiting.load()
        waiting.first()
        return waiting.phases()
    finally:
        waiting.close()


def _order(side: Side, runner: str, task: Task, settings: Settings, folder: str) -> dict[str, Any]:
    return {
        "runner": runner,
        "options": side.options,
        "ours": side.is_ours,
        "task": task.as_dict(),
        "folder": folder,  # for what two processes of a side hand on
        "folders": settings.folders,
        "threads": settings.threads,
        "device": settings.device,
        "dtype": settings.dtype,
    }


def _compare(
    task: Task, children: dict[str, Child], results: dict[str, document.Result], say: Say
) -> dict[str, list[list[int]]]:
    """Every side once; returns the tokens that each generated."""
    answers: dict[str, dict[str, Any]] = {}
    for name in list(children):
        say(f"{name}: first call")
        try:
            answers[name] = children[name].first()
        except Refused as error:
            results[name]["refused"] = str(error)
            children.pop(name)  # closed with the others
            continue
        answer, result = answers[name], results[name]
        result["first_seconds"] = answer["seconds"]
        result["peak_bytes"] = answer["peak_bytes"]
        if "cache_bytes" in answer:
            result["cache_bytes"] = answer["cache_bytes"]
        if "tiers" in answer:
            result["tiers"] = answer["tiers"]
        against = SIDES[name].equals if SIDES[name].equals in answers else task.reference
        if against != name and against in answers:
            result["verified"] = verify(answers[against], answer, against, against == SIDES[name].equals)
    return {name: answer["tokens"] for name, answer in answers.items()}


def verify(theirs: dict[str, Any], ours: dict[str, Any], against: str, must: bool) -> document.Verified:
    """One side's outputs beside another's; what must be equal, with all its padding, hypotheses and scores."""
    pairs = list(zip(theirs["tokens"], ours["tokens"], strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    form = "rows" if must and "rows" in theirs and "rows" in ours else "tokens"
    different = [
        number for number, (one, other) in enumerate(zip(theirs[form], ours[form], strict=True)) if one != other
    ]
    if must and "scores" in theirs:
        scores = zip(theirs["scores"], ours["scores"], strict=True)
        apart = (max(map(_difference, one, other), default=0.0) for one, other in scores)
        different += [n for n, off in enumerate(apart) if not off <= SCORES and n not in different]
    return {
        "against": against,
        "outputs": len(pairs),
        "different": sorted(different),
        "same_tokens": same / max(1, sum(len(one) for one, _ in pairs)),
        "must": must,
    }


def _difference(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)  # both may be infinite


def _is_wrong(result: document.Result) -> bool:
    verified = result.get("verified")
    return verified is not None and verified["must"] and bool(verified["different"])


def _rounds(number: int, children: dict[str, Child], say: Say) -> Iterator[document.Round]:
    """The sides take turns, and take turns at being first."""
    names = list(children)
    calls = {}
    for name in names:  # the first call was the slowest; this one says how often to call in a turn
        say(f"{name}: warming up")
        calls[name] = math.ceil(SHORTEST / children[name].turn())
    for count in range(number):
        one: document.Round = {"seconds": {}, "other_processes": {}}
        first = count % len(names)
        for name in (*names[first:], *names[:first]):
            say(f"{name}: round {count + 1} of {number}")
            time.sleep(PAUSE)
            child = children[name]
            others, before = OtherProcesses(), child.cpu_seconds
            one["seconds"][name] = child.turn(calls[name])
            one["other_processes"][name] = others.cores(besides=child.cpu_seconds - before)
        yield one


def _summarise(reference: str, rounds: list[document.Round], results: dict[str, document.Result]) -> None:
    for name in rounds[0]["seconds"] if rounds else ():
        results[name]["seconds"] = statistics.median(one["seconds"][name] for one in rounds)
        ratios = [one["seconds"][reference] / one["seconds"][name] for one in rounds]
        if name != reference:
            results[name]["ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
