"""A suite from its first task to the document, which is written after each of them."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastgen.bench import document, machine, measure, provenance
from fastgen.bench.measure import Settings
from fastgen.bench.sections import Section, needed
from fastgen.bench.sides import SIDES
from fastgen.bench.suites import SUITES
from fastgen.bench.tasks import Task


def sections(suite: str, quick: bool, settings: Settings, only: list[str], sides: list[str]) -> list[Section]:
    """What of a suite can be done: without tasks that nobody asked for, or whose data are not there."""
    found = []
    for section in SUITES[suite](quick):
        text, tasks = section.text, []
        for task in section.tasks:
            if only and task.name not in only:
                continue
            if missing := needed(task, settings.folders):
                text += f" Left out: {task.what} (needs {missing})."
                continue
            if not sides or set(sides) & set(task.sides):
                tasks.append(_of(task, sides))
        if tasks:
            found.append(Section(section.title, text, tasks, section.show))
    return found


def _of(task: Task, sides: list[str]) -> Task:
    """With the sides asked for, and those that they are compared with."""
    if not sides:
        return task
    needed = {task.reference, *sides, *(SIDES[name].equals for name in sides)}
    return replace(task, sides=tuple(name for name in task.sides if name in needed))


def run(
    suite: str,
    planned: list[Section],
    quick: bool,
    settings: Settings,
    command: str,
    file: Path,
    say: Callable[[str, Task | None], None],
) -> document.Document:
    """Measure and write `file`; `say` is told what is being done."""
    names = dict.fromkeys(name for section in planned for task in section.tasks for name in task.sides)
    found: document.Document = {
        "fastgen_bench": document.FORMAT,
        "suite": suite,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(settings.device, settings.threads),
        "versions": {"python": platform.python_version(), "fastgen": _version()},
        "settings": {
            "rounds": settings.rounds,
            "threads": settings.threads,
            "device": settings.device,
            "dtype": settings.dtype,
            "quick": quick,
            "pause_seconds": measure.PAUSE,
        },
        "statements": measure.STATEMENTS,
        "sides": {
            name: {
                "label": SIDES[name].label,
                "settings": SIDES[name].settings,
                "lossy": SIDES[name].lossy,
                "versions": {},
            }
            for name in names
        },
        "sections": [],
        "tasks": [],
    }
    if commit := provenance.commit():
        found["commit"] = commit
    for section in planned:
        done: document.Section = {"title": section.title, "text": section.text, "tasks": [], "show": section.show}
        found["sections"].append(done)
        for task in section.tasks:
            result, versions = measure.run(
                task,
                settings,
                section.show,
                lambda what, task=task: say(what, task),  # type: ignore[misc]
            )
            found["tasks"].append(result)
            done["tasks"].append(task.name)
            for name, own in versions.items():
                found["sides"][name]["versions"] |= own
                found["versions"] |= own
            write(found, file)
            say("", None)
    return found


def _version() -> str:
    import fastgen

    return fastgen.__version__


def write(found: document.Document, file: Path) -> None:
    """All of it or nothing: a run that is killed leaves the tasks before."""
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, file)


def _lacks(task: document.Task, name: str) -> bool:
    """Whether a side of fastgen could not run because its host is not installed."""
    return any(task["sides"].get(side, {}).get("missing", False) for side in (name, SIDES[name].equals))


def is_wrong(found: document.Document) -> list[str]:
    """Sides of fastgen whose outputs are not stock's, or that could not do a task: one sentence each."""
    wrong = []
    for task in found["tasks"]:
        for name, result in task["sides"].items():
            verified = result.get("verified")
            if verified and verified["must"] and verified["different"]:
                count = f"{len(verified['different'])} of {verified['outputs']}"
                wrong.append(f"{task['name']}: {count} outputs of {name} differ from {verified['against']}'s")
            elif "refused" in result and SIDES[name].is_ours and not _lacks(task, name):
                wrong.append(f"{task['name']}: {name} could not do it: {result['refused']}")
    return wrong
