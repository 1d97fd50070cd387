"""`fastgen-bench --compare baseline.json`: whether a run has become slower, calls more, or says something else.

What fails (exit code 1): outputs that must be equal and differ; a side that is refused now; a ratio that dropped by
more than chance and SMALLEST_DROP explain (`fastgen.bench.noise`); a count that rose. What is only said: a task or side
that was not run now, other machines and settings, numbers that have become better.

Counts are exact, and belong to versions: a host or torch of another version calls other operators. So they are compared
only where the versions are those of the baseline; otherwise that is said in one sentence, and fails. With several
baselines counts, outputs and settings are compared with the last one; ratios with all. Only fastgen's sides can fail,
and tasks that are other work now are not compared. Where in the end nothing was compared, that fails, too: a gate
that compares nothing guards nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastgen.bench.document import FORMAT, Document, Result, Task, problem
from fastgen.bench.noise import SMALLEST_DROP, Estimate, allowed_drop, center, drift
from fastgen.bench.report import facts
from fastgen.pipeline.errors import InputError

FAILURE, REGRESSION, WARNING, NOTE = "failure", "regression", "warning", "note"
_SEVERITIES = (FAILURE, REGRESSION, WARNING, NOTE)
_MACHINE = ("cpu", "cores", "threads", "device", "system")
_SETTINGS = ("threads", "device", "dtype", "quick", "pause_seconds")
_SAME_WORK = ("weights", "options", "shape")  # of a task


@dataclass
class _Compared:
    """How many ratios or counts there were to compare, and what came of it."""

    compared: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    severity: str  # one of the four
    text: str
    task: str = ""
    side: str = ""
    before: float | None = None  # the ratio, or the count
    now: float | None = None
    allowed: float | None = None  # the least ratio that chance explains


def load(file: Path) -> Document:
    """Raises InputError."""
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    if not isinstance(document, dict) or "fastgen_bench" not in document:
        raise InputError(f"{file} was not written by fastgen-bench.")
    if document["fastgen_bench"] != FORMAT:
        raise InputError(
            f"{file} has format {document['fastgen_bench']!r} of fastgen-bench; this version reads {FORMAT}."
        )
    if wrong := problem(document, Document):
        raise InputError(f"{file} is not a whole document of fastgen-bench: {wrong}.")
    return document  # type: ignore[return-value]


def compare(baselines: Document | Sequence[Document], new: Document) -> list[Finding]:
    """What is worth saying, the worst first. Several baselines, of one commit, also show the drift between runs."""
    olds = [baselines] if isinstance(baselines, dict) else list(baselines)
    if not olds:
        raise ValueError("there is no baseline to compare with")
    last = olds[-1]
    findings = [*_surroundings(olds, new), *_of_tasks(last, new)]
    ratios, counts = _of_ratios(olds, new), _of_counts(last, new)
    findings += [*ratios.findings, *counts.findings]
    if not ratios.compared and not counts.compared and not status(findings):
        findings.append(Finding(FAILURE, "nothing of this run could be compared with the baseline"))
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def status(findings: Sequence[Finding]) -> int:
    """The exit code: 1 if anything fails, else 0."""
    return int(any(finding.severity in (FAILURE, REGRESSION) for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """For people, one line each, and a verdict."""
    rows = [("", "task", "side", "before", "now", "at least", "what")]
    for each in findings:
        values = (_number(each.before), _number(each.now), _number(each.allowed))
        rows.append((each.severity, each.task, each.side, *values, each.text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = {severity: sum(each.severity == severity for each in findings) for severity in _SEVERITIES}
    found = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count)
    verdict = "It has become worse" if status(findings) else "Nothing has become worse"
    return "\n".join([*(lines if findings else []), f"{verdict}{f': {found}' if found else ''}.", ""])


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


def _surroundings(olds: Sequence[Document], new: Document) -> Iterator[Finding]:
    """What else has changed between the runs, in one sentence for each baseline."""
    for number, old in enumerate(olds, 1):
        which = f"baseline {number}" if len(olds) > 1 else "the baseline"
        other = [
            *_differences(old["machine"], new["machine"], _MACHINE),
            *_differences(old["settings"], new["settings"], _SETTINGS),
            *_differences(old["versions"], new["versions"], sorted({*old["versions"], *new["versions"]} - {"fastgen"})),
        ]
        if other:
            yield Finding(WARNING, f"ratios are compared although {which} had other {', '.join(dict.fromkeys(other))}")


def _differences(old: dict[str, Any], new: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{name} ({old.get(name)}, now {new.get(name)})" for name in names if old.get(name) != new.get(name)]


def _of_tasks(old: Document, new: Document) -> Iterator[Finding]:
    """Tasks and sides that are there no more, or refused, and outputs that differ."""
    before, now = _tasks(old), _tasks(new)
    for name, task in now.items():
        for side, result in task["sides"].items():
            verified = result.get("verified")
            if verified and verified["must"] and verified["different"]:
                count = f"{len(verified['different'])} of {verified['outputs']}"
                yield Finding(FAILURE, f"{count} outputs differ from {verified['against']}'s", name, side)
            if near := _near_ties(now, name, side) - _near_ties(before, name, side):
                numbers = ", ".join(map(str, sorted(near)))
                yield Finding(WARNING, f"outputs that were the same are at near-ties now: {numbers}", name, side)
        if name not in before:
            yield Finding(NOTE, "the baseline does not have this task", name)
    for name, task in before.items():
        if name not in now:
            yield Finding(WARNING, "this task was not run", name)
            continue
        if other := [part for part in _SAME_WORK if task.get(part) != now[name].get(part)]:
            yield Finding(WARNING, f"not compared: the task has other {', '.join(other)} than in the baseline", name)
        for side, result in task["sides"].items():
            if side not in now[name]["sides"]:
                yield Finding(WARNING, "this side was not run", name, side)
            elif _is_ours(result) and not {"verified", "refused"} & now[name]["sides"][side].keys():
                yield Finding(FAILURE, "its outputs were compared, and now they were not", name, side)
            elif "refused" not in result and (why := now[name]["sides"][side].get("refused")) is not None:
                yield Finding(FAILURE, f"it did this task, and now refuses it: {why}", name, side)


def sensitivity(baselines: Sequence[Document], new: Document) -> str:
    """From which drop on each ratio of fastgen's fails, in a sentence; "" where none could."""
    series = _series(baselines, new)
    between = drift([runs for runs, _ in series.values()])
    drops = [
        (-math.expm1(-allowed), f"{side} of {name}")
        for (name, side), (runs, logs) in series.items()
        if _is_ours(_tasks(new)[name]["sides"][side]) and (allowed := allowed_drop(runs, logs, between)) is not None
    ]
    if not drops:
        return ""
    (least, _), (most, where) = min(drops), max(drops)
    return f"A ratio that drops by {least:.0%} or more fails" + (
        "." if round(least, 2) == round(most, 2) else f" where rounds agree most, and by {most:.0%} in {where}."
    )


_Series = dict[tuple[str, str], tuple[list[list[float]], list[float]]]


def _series(olds: Sequence[Document], new: Document) -> _Series:
    """By task and side: the logarithms of the ratios of each baseline, and of the new run."""
    before: list[dict[str, Task]] = [_tasks(old) for old in olds]
    series: _Series = {}
    for name, task in _tasks(new).items():
        same = [tasks[name] for tasks in before if name in tasks and _is_same_work(tasks[name], task)]
        for side in task["sides"]:
            runs = [logs for each in same if (logs := _logs(each, side, task))]
            if runs and (logs := _logs(task, side, task)):
                series[name, side] = runs, logs
    return series


def _near_ties(tasks: dict[str, Task], name: str, side: str) -> set[int]:
    return set(facts.near_ties(tasks[name]["sides"].get(side, Result()))) if name in tasks else set()


def _of_ratios(olds: Sequence[Document], new: Document) -> _Compared:
    series = _series(olds, new)
    between, result = drift([runs for runs, _ in series.values()]), _Compared()
    for (name, side), (runs, logs) in series.items():
        is_ours = _is_ours(_tasks(new)[name]["sides"][side])
        result.compared += is_ours
        if (finding := _of_ratio(name, side, runs, logs, between)) is not None:
            if finding.severity == REGRESSION and not is_ours:
                finding = replace(finding, severity=NOTE)
            result.findings.append(finding)
    return result


def _is_same_work(old: Task, new: Task) -> bool:
    return all(old.get(part) == new.get(part) for part in _SAME_WORK)


def _is_ours(result: Result) -> bool:
    """Whether a side is one whose outputs must be stock's."""
    verified = result.get("verified")
    return verified is not None and verified["must"]


def _of_ratio(
    task: str, side: str, runs: Sequence[Sequence[float]], logs: Sequence[float], between: Estimate
) -> Finding | None:
    before, now = statistics.fmean(map(center, runs)), center(logs)
    allowed, values = allowed_drop(runs, logs, between), (task, side, math.exp(before), math.exp(now))
    change = f"{abs(math.expm1(now - before)):.0%}"
    if allowed is None:
        text = f"{change} less, and of one round each nobody knows what is chance"
        return Finding(WARNING, text, *values) if math.exp(now - before) < 1 - SMALLEST_DROP else None
    least = math.exp(before - allowed)
    if now < before - allowed:
        return Finding(REGRESSION, f"the ratio dropped by {change}", *values, least)
    if now > before + allowed:
        return Finding(NOTE, f"the ratio rose by {change}: renew the baseline", *values, least)
    return None


def _logs(task: Task, side: str, of: Task) -> list[float]:
    """Of a side's ratio, round by round; none of the reference itself, or of another one than in the task `of`."""
    reference = task.get("reference")
    if reference is None or side == reference or reference != of.get("reference"):
        return []
    rounds = [each["seconds"] for each in task.get("rounds", [])]
    return [math.log(each[reference] / each[side]) for each in rounds if each.get(reference) and each.get(side)]


def _of_counts(old: Document, new: Document) -> _Compared:
    before, found = _tasks(old), _Compared()
    skipped: dict[str, None] = {}
    for name, task in _tasks(new).items():
        if name not in before or not _is_same_work(before[name], task):
            continue
        for side, result in task["sides"].items():
            counts = before[name]["sides"].get(side, Result()).get("counts")
            if not counts:
                continue
            if "counts" not in result:
                if "refused" not in result:
                    found.findings.append(
                        Finding(WARNING, "the baseline has counts, and this run has none", name, side)
                    )
            elif other := _differences(_versions(old, side), _versions(new, side), _named(old, new, side)):
                skipped |= dict.fromkeys(other)
            elif _is_ours(result):
                found.compared += 1
                found.findings += _of_result(name, side, counts, result["counts"])
    if skipped:
        text = f"counts belong to versions and are not compared, as the baseline's had {', '.join(skipped)}"
        found.findings.append(Finding(FAILURE, f"{text}: renew it"))
    return found


def _of_result(task: str, side: str, before: dict[str, int], now: dict[str, int]) -> Iterator[Finding]:
    for what, count in before.items():
        if what not in now:
            yield Finding(WARNING, f"{what} were not counted", task, side, count)
        elif now[what] > count:
            yield Finding(REGRESSION, f"more {what.replace('_', ' ')}", task, side, count, now[what], count)
        elif now[what] < count:
            yield Finding(NOTE, f"fewer {what.replace('_', ' ')}: renew the baseline", task, side, count, now[what])


def _versions(document: Document, side: str) -> dict[str, str]:
    own = document["sides"][side]["versions"] if side in document["sides"] else {}
    return {**document["versions"], **own}


def _named(old: Document, new: Document, side: str) -> list[str]:
    """All but fastgen's, whose counts are what is tested, and Python's, which calls the same operators."""
    return sorted({*_versions(old, side), *_versions(new, side)} - {"fastgen", "python"})


def _tasks(document: Document) -> dict[str, Task]:
    return {task["name"]: task for task in document["tasks"]}
