"""What follows from a document, for the report and for the terminal: verdicts, spreads, and numbers in words."""

from __future__ import annotations

from collections.abc import Iterator

from fastgen.bench.document import Document, Result, Section, Side, Task

BUSY = 0.1  # cores: other processes that keep more than this busy slow down what is measured


def tasks_of(document: Document, section: Section) -> list[Task]:
    """A section's tasks, in its order; those that the run left out are not among them."""
    by_name = {task["name"]: task for task in document["tasks"]}
    return [by_name[name] for name in section["tasks"] if name in by_name]


def sections(document: Document) -> list[Section]:
    """The document's sections, and one more for tasks that stand in none: nothing measured goes unseen."""
    listed = {name for section in document["sections"] for name in section["tasks"]}
    rest = [task["name"] for task in document["tasks"] if task["name"] not in listed]
    if not rest:
        return document["sections"]
    other: Section = {"title": "Other tasks", "text": "", "tasks": rest, "show": ["ratios", "seconds", "outputs"]}
    return [*document["sections"], other]


def results(task: Task) -> dict[str, Result]:
    return task.get("sides", {})


def results_of(tasks: list[Task], side: str) -> Iterator[tuple[Task, Result]]:
    """A side's results, with their tasks."""
    return ((task, results(task)[side]) for task in tasks if side in results(task))


def sides_of(document: Document, tasks: list[Task]) -> list[str]:
    """The sides that have a result in any of `tasks`, in the document's order."""
    seen = {side for task in tasks for side in results(task)}
    return [side for side in document["sides"] if side in seen] + sorted(seen - set(document["sides"]))


def side(document: Document, name: str) -> Side:
    return document["sides"].get(name) or {"label": name, "settings": [], "lossy": False, "versions": {}}


def label(document: Document, name: str) -> str:
    return side(document, name)["label"] or name


def lossy(document: Document, name: str) -> bool:
    return side(document, name)["lossy"]


def reference(task: Task) -> str | None:
    return task.get("reference")


def ours(document: Document) -> list[str]:
    """fastgen's sides: those whose outputs must be equal to another's."""
    return [
        name
        for name in sides_of(document, document["tasks"])
        if name.startswith("fastgen")
        or any("verified" in result and result["verified"]["must"] for _, result in results_of(document["tasks"], name))
    ]


def differs(result: Result) -> bool:
    """Outputs that must be equal are not."""
    return "verified" in result and result["verified"]["must"] and bool(result["verified"]["different"])


def near_ties(result: Result) -> list[int]:
    """Outputs that differ where the other side is undecided itself."""
    return result["verified"].get("near_ties", []) if "verified" in result else []


def timed(result: Result) -> bool:
    """Whether its time may be shown: a time of other outputs is none."""
    return "refused" not in result and not differs(result)


def outputs(result: Result) -> str:
    """How its outputs compare with those of the side that they are compared with."""
    if "refused" in result:
        return "refused"
    if "verified" not in result:
        return ""
    verified = result["verified"]
    different, near = len(verified["different"]), len(near_ties(result))
    if not different:
        same = f"{verified['outputs'] - near:,} same"
        return f"{same}, {near:,} at a near-tie" if near else same
    if verified["must"]:
        return f"{different:,} of {verified['outputs']:,} differ"
    return f"{part(verified['same_tokens'])} of tokens same"


def spread(task: Task, name: str) -> tuple[float, float] | None:
    """A side's least and largest seconds of the rounds."""
    seconds = [each["seconds"][name] for each in task.get("rounds", []) if name in each["seconds"]]
    return (min(seconds), max(seconds)) if seconds else None


def busy(document: Document) -> tuple[int, int, int, float]:
    """Measurements, how many of them ran beside busy processes, of how many that isn't known, and the most cores."""
    cores = [
        each["other_processes"].get(name)
        for task in document["tasks"]
        for each in task.get("rounds", [])
        for name in each["seconds"]
    ]
    known = [each for each in cores if each is not None]
    return len(cores), sum(each > BUSY for each in known), len(cores) - len(known), max(known, default=0.0)


def seconds(value: float | None) -> str:
    """With its unit, three digits or more."""
    if value is None:
        return "–"
    return f"{number(value)} s"


def number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}" if abs(value) >= 0.1 or not value else f"{value:.3g}"


def part(value: float) -> str:
    """In percent, never rounded up to all or down to nothing."""
    percent = f"{value:.1%}" if 0.0005 <= value < 0.9995 or value in (0, 1) else f"{value:.3%}"
    return percent.replace(".0%", "%")


def times(value: float) -> str:
    return f"{value:.2f}x"


def ratio(result: Result) -> str:
    """Median, least and largest of the rounds."""
    return f"{times(result['ratio']['median'])} ({interval(result)})"


def interval(result: Result) -> str:
    """The ratio's least and largest of the rounds."""
    return f"{result['ratio']['min']:.2f} to {result['ratio']['max']:.2f}"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
