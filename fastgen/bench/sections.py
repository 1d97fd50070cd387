"""A suite's sections: tables and figures, each a list of tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastgen.bench.models import TRAINED, Folders
from fastgen.bench.tasks import Task

RANDOM = "Random weights in the model's true shape, so lengths are forced equal."
QUICK = " Quick: fewer layers, tokens and inputs than the model has; figures are not those of the whole model."
SHOWN = ["ratios", "seconds", "outputs", "memory"]


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    tasks: list[Task]
    show: list[str] = field(default_factory=lambda: list(SHOWN))


def needed(task: Task, folders: Folders) -> str:
    """The options that the task needs and that were not given."""
    trained = TRAINED.get(task.model)
    return " and ".join(f"--{name} DIR" for name in (trained.needs if trained else ()) if name not in folders)


def sizes_of(task: dict[str, Any]) -> str:
    beams = f", {task['beams']} beams" if task["beams"] > 1 else ""
    source = f" x {task['source']}" if task["source"] else ""
    return f"{task['batch']}{source} -> {task['new']}{beams}"


def task_of(name: str, label: str, model: str, sides: tuple[str, ...], **sizes: Any) -> Task:
    layers = f", {sizes['layers']}+{sizes['layers']} layers" if sizes.get("layers") else ""
    return Task(name, f"{label}{layers}, {sizes_of({'beams': 1, 'source': 0, **sizes})}", model, sides, **sizes)


def random_text(quick: bool) -> str:
    return RANDOM + QUICK if quick else RANDOM
