"""One task: every side in a process of its own, outputs compared first, then timed in turn."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from fastgen.bench import document, models, quality
from fastgen.bench.child import Changed, Child
from fastgen.bench.machine import OtherProcesses
from fastgen.bench.runners import Missing, Refused
from fastgen.bench.sides import SIDES, Side
from fastgen.bench.tasks import Task

# Threads of one side spin for some milliseconds (OpenMP) when they have nothing left to do; the next side waits for it.
PAUSE = 0.5
SHORTEST = 0.5  # seconds of a turn: a shorter call is repeated
HOSTS = ("transformers", "fairseq")  # runners whose insides can be seen: phases and counts
SCORES = 1e-4  # how far scores of equal hypotheses may be apart
NEAR_TIES = 1000  # outputs for each of which one may stand at a near-tie

STATEMENTS = [
    "Every side is a process of its own, started by one parent, which keeps them waiting while another one works.",
    "Random models are built by every side from the same seed, trained ones loaded from the same files: same weights.",
    "All sides get the same inputs, in the same batches unless a side's settings say otherwise. Random models generate "
    "a fixed number of tokens (the least is the most), so all do the same work. Trained ones end by themselves: "
    "fastgen where stock does, CTranslate2 by its own rule.",
    "Every side decodes everything once before the clock: its outputs are compared, and it warms up, compiles and "
    "records. The outputs of timed calls are compared with those, outside of the clock. A side of fastgen whose "
    "outputs are not stock's, token for token, is not timed, nor one that would fall back to stock.",
    f"In float32 one output of a task, and one of each {NEAR_TIES:,}, may differ if stock is shown to have a near-tie "
    "there: asked for that input alone, as it is and with each weight moved at random by about 1.2e-7 of itself at "
    "most (float32's epsilon), stock gives sometimes its own output and sometimes fastgen's, with all its hypotheses. "
    "The report says which output it is.",
    "In each round the sides take turns, each with all threads for itself, and the side that goes first changes. "
    f"Between turns nothing runs for {PAUSE} s. Calls shorter than {SHORTEST} s are repeated and their mean taken.",
    "A ratio is the reference's seconds divided by the side's in the same round; shown are the median of the rounds, "
    "the least and the largest. Loading, converting and starting processes are not timed.",
    "Memory of the first call is the most that the process held beyond what it held once the model was loaded: "
    "caches, buffers and temporaries, fastgen's packed copies of weights, and what compiling takes where something is "
    "compiled. What a side makes of the weights while it loads is not in it (CTranslate2's own copies, int8's smaller "
    "ones), but in the memory of the whole process, with weights and libraries. Caches are keys and values alone.",
    "Phases are of a call of its own, in which the stack is looked at about a thousand times a second. Steps that "
    "fastgen would replay from a recording are not replayed there: a recording does not say what belongs to what.",
    "Counts are of a second call with packing='off', replay='off' and no cache chosen by a plan: those choices rest on "
    "timings, which no two runs share.",
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
T = TypeVar("T")


def run(task: Task, settings: Settings, show: list[str], say: Say) -> tuple[document.Task, dict[str, dict[str, str]]]:
    """The task's part of the document, and the versions of what its sides ran; `show` is its section's."""
    rounds: list[document.Round] = []
    with _Sides(task, settings, say) as sides:
        tokens = sides.compare()
        if "metrics" in show:
            for name, found in tokens.items():
                sides.results[name]["metrics"] = quality.metrics(task.as_dict(), settings.folders, found)
        if settings.counts:
            sides.count()
        else:
            rounds = sides.time(min(task.rounds or settings.rounds, settings.rounds))
            if "phases" in show:
                sides.find_phases()
    _summarise(task.reference, rounds, sides.results)
    measured: document.Task = {
        "name": task.name,
        "what": task.what,
        "weights": "trained" if task.model in models.TRAINED else "random",
        "options": task.options,
        "shape": task.shape,
        "reference": task.reference,
        "sides": sides.results,
        "rounds": rounds,
    }
    if task.axis:
        measured["axis"], measured["line"] = task.axis, task.line
    return measured, sides.versions


class _Sides:
    """A process for each side of a task. One that cannot go on is left out from there, and its result says why."""

    def __init__(self, task: Task, settings: Settings, say: Say) -> None:
        self._task, self._settings, self._say = task, settings, say
        self.results: dict[str, document.Result] = {name: {} for name in task.sides}
        self.versions: dict[str, dict[str, str]] = {}
        self._children: dict[str, Child] = {}  # of the sides that can go on
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Sides:
        with self._stack:
            self._load()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _load(self) -> None:
        self._say("loading")
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fastgen-bench-"))
        converters = dict.fromkeys(SIDES[name].converter for name in self._task.sides)
        started = {name: self._start(SIDES[name]) for name in self._task.sides if not SIDES[name].converter}
        for converter in filter(None, converters):  # these sides load what is converted once for all of them
            engines = [name for name in self._task.sides if SIDES[name].converter == converter]
            with contextlib.closing(self._start(SIDES[engines[0]], converter)) as child:
                is_converted = self._do(engines[0], child.load) is not None
            for name in engines:
                if is_converted:
                    started[name] = self._start(SIDES[name])
                else:
                    self.results[name] |= self.results[engines[0]]
        for name in self._task.sides:
            if name in started and self._do(name, started[name].load) is not None:
                self._children[name] = started[name]
                self.versions[name] = started[name].versions

    def _start(self, side: Side, runner: str = "", **environment: str) -> Child:
        asked = order(side, runner or side.runner, self._task, self._settings, self._folder)
        child = Child(asked, side.environment | environment)
        self._stack.callback(child.close)
        return child

    def _do(self, name: str, ask: Callable[[], T]) -> T | None:
        """The answer of a side, or None: then it has said why not, and is left out."""
        try:
            return ask()
        except Changed as error:
            verified = self.results[name].get("verified")
            if verified is not None and verified["must"]:
                verified["different"] = sorted({*verified["different"], *error.outputs})
            else:
                self.results[name]["refused"] = str(error)
        except Refused as error:
            self.results[name]["refused"] = str(error)
            if isinstance(error, Missing):
                self.results[name]["missing"] = True
        self._children.pop(name, None)
        return None

    def compare(self) -> dict[str, list[list[int]]]:
        """Every side once; returns the tokens that each generated."""
        answers: dict[str, dict[str, Any]] = {}
        for name in list(self._children):
            self._say(f"{name}: first call")
            if answer := self._do(name, self._children[name].first):
                answers[name] = answer
        for name, answer in answers.items():
            result = self.results[name]
            result["first_seconds"] = answer["seconds"]
            for measured in ("peak_bytes", "resident_bytes", "cache_bytes", "tiers"):
                if measured in answer:
                    result[measured] = answer[measured]
            must = bool(SIDES[name].equals)
            against = SIDES[name].equals or self._task.reference
            if against not in answers and must:
                result["refused"] = f"there is nothing to compare it with: {against} did not run"
            elif against in answers and against != name:
                result["verified"] = verify(answers[against], answer, against, must)
                if must:
                    self._find_near_ties(result["verified"], answers[against], answer)
            if "refused" in result or _is_wrong(result):
                self._children.pop(name)
        return {name: answer["tokens"] for name, answer in answers.items()}

    def _find_near_ties(self, verified: document.Verified, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        """Moves outputs from those that differ to those between which and its own the host is undecided."""
        host = SIDES[verified["against"]]
        few = max(1, verified["outputs"] // NEAR_TIES)  # more are no coincidence
        if self._settings.counts or self._settings.dtype != "float32" or host.runner not in HOSTS:
            return
        if not 0 < len(verified["different"]) <= few:
            return
        for number in list(verified["different"]):
            self._say(f"{verified['against']}: is output {number} at a near-tie?")
            with contextlib.closing(self._start(host)) as child, contextlib.suppress(Refused):
                child.load()
                answers = child.near_ties(number)
                # Its own among them: else it is something else that decides, such as the rest of the batch.
                if all(any(is_answer(one, number, answer) for answer in answers) for one in (theirs, ours)):
                    verified["different"].remove(number)
                    verified.setdefault("near_ties", []).append(number)

    def count(self) -> None:
        for name, child in list(self._children.items()):
            if SIDES[name].runner in HOSTS and (found := self._do(name, child.counts)):
                self.results[name]["counts"] = found

    def time(self, number: int) -> list[document.Round]:
        """The sides take turns, and take turns at being first."""
        if self._task.reference not in self._children:
            return []
        calls: dict[str, int] = {}
        for name, child in list(self._children.items()):  # the first call was the slowest; this one is as all others
            self._say(f"{name}: warming up")
            if seconds := self._do(name, child.turn):
                calls[name] = math.ceil(SHORTEST / seconds)
        rounds: list[document.Round] = []
        for count in range(number):
            rounds.append({"seconds": {}, "other_processes": {}})
            names = list(calls)
            first = count % len(names)
            for name in (*names[first:], *names[:first]):
                if name not in self._children:
                    continue
                self._say(f"{name}: round {count + 1} of {number}")
                time.sleep(PAUSE)
                self._take_turn(name, calls[name], rounds[-1])
        return rounds

    def _take_turn(self, name: str, calls: int, to: document.Round) -> None:
        child = self._children[name]
        others, before = OtherProcesses(), child.cpu_seconds
        if seconds := self._do(name, lambda: child.turn(calls)):
            to["seconds"][name] = seconds
            to["other_processes"][name] = others.cores(besides=child.cpu_seconds - before)

    def find_phases(self) -> None:
        for name in list(self._children):
            if SIDES[name].runner in HOSTS:
                self._say(f"{name}: phases")
                if found := self._do(name, functools.partial(self._phases, name)):
                    self.results[name]["phases"] = found

    def _phases(self, name: str) -> dict[str, float]:
        """On a GPU of another process, in which every operator is waited for: else its time falls in a later phase."""
        if self._settings.device == "cpu":
            return self._children[name].phases()
        child = self._start(SIDES[name], CUDA_LAUNCH_BLOCKING="1")
        child.load()
        child.first()
        return child.phases()


def order(side: Side, runner: str, task: Task, settings: Settings, folder: str) -> dict[str, Any]:
    """What a side's process is told (see fastgen.bench.worker)."""
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


def is_answer(outputs: dict[str, Any], number: int, alone: dict[str, Any]) -> bool:
    """Whether one of the outputs is what was answered to that input alone, but for what pads a batch's rows."""
    one: dict[str, Any] = {name: [outputs[name][number]] for name in ("tokens", "rows", "scores") if name in outputs}
    if "rows" in one and "scores" not in one:  # transformers': one row, of tokens
        width = len(alone["rows"][0])
        if len(set(one["rows"][0][width:])) <= 1:
            one["rows"] = [one["rows"][0][:width]]
    return not verify(alone, one, "", must=True)["different"]


def _difference(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)  # both may be infinite


def _is_wrong(result: document.Result) -> bool:
    verified = result.get("verified")
    return verified is not None and verified["must"] and bool(verified["different"])


def _summarise(reference: str, rounds: list[document.Round], results: dict[str, document.Result]) -> None:
    """Of sides that took part in all rounds and were not found to be wrong in one."""
    for name, result in results.items():
        if not rounds or "refused" in result or _is_wrong(result) or "refused" in results[reference]:
            continue
        if not all(name in one["seconds"] for one in rounds):
            continue
        result["seconds"] = statistics.median(one["seconds"][name] for one in rounds)
        ratios = [one["seconds"][reference] / one["seconds"][name] for one in rounds]
        if name != reference:
            result["ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
