"""What a suite of `fastgen-bench` found, as tables in Markdown."""

from __future__ import annotations

from table_markup import table

from fastgen.bench.document import Document, Result, Section, Task
from fastgen.bench.report import facts, summary
from fastgen.phases import PHASES

_MOST_COLUMNS = 6  # of sides, beside the task's: else tasks are the columns


def shown(document: Document) -> str:
    """Each section's tables, and below them what ran, where, and how equal and how quiet it was."""
    parts = [_section(document, section) for section in document["sections"]]
    versions = sorted(document["versions"].items())
    ran = ", ".join(f"{name} {version}" for name, version in versions if name != "fastgen")
    settings, machine = document["settings"], document["machine"]
    parts.append(
        f"{document['date'][:10]}, {machine['cpu']}, {settings['rounds']} rounds, {settings['threads']} threads, "
        f"{settings['dtype']}; {ran}. {' '.join(one.text for one in summary.checks(document))}"
    )
    return "\n\n".join(parts)


def equal_outputs(documents: dict[str, Document]) -> str:
    """How many outputs of each suite had to be the host's, and were, token for token."""
    rows, total = [], [0, 0, 0]
    for name, document in documents.items():
        found = [
            result
            for task in document["tasks"]
            for result in facts.results(task).values()
            if "verified" in result and result["verified"]["must"]
        ]
        near, different = (sum(len(part(one)) for one in found) for part in (facts.near_ties, _different))
        same = sum(one["verified"]["outputs"] for one in found) - near - different
        counts = (same, near, different)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
        rows.append(
            (f"`{name}`", document["date"][:10], document["machine"]["cpu"], *(f"{count:,}" for count in counts))
        )
    rows.append(("all", "", "", *(f"**{count:,}**" for count in total)))
    return table(("suite", "measured on", "processor", "same", "at a near-tie", "different"), rows)


def _different(result: Result) -> list[int]:
    return [one for one in result["verified"]["different"] if one not in facts.near_ties(result)]


def phases(document: Document) -> str:
    """Where the time of each side goes whose insides can be seen."""
    rows = []
    for task in document["tasks"]:
        for side, result in facts.results(task).items():
            if found := result.get("phases"):
                all_of_it = sum(found.get(name, 0.0) for name in PHASES)
                each = (facts.seconds(found[name]) if name in found else "–" for name in PHASES)
                rows.append((task["name"], facts.label(document, side), *each, facts.seconds(all_of_it)))
    return table(("task", "side", *PHASES, "all"), rows)


def _section(document: Document, section: Section) -> str:
    tasks = facts.tasks_of(document, section)
    sides = facts.sides_of(document, tasks)
    show = section["show"]
    tables = [
        _metrics(document, tasks) if "metrics" in show else "",
        _caches(document, tasks, sides) if show[0] == "memory" else "",
        _ratios(document, tasks, sides) if "ratios" in show else "",
        _peaks(document, tasks, sides) if {"lines", "memory"} <= {*show} else "",
    ]
    return "\n\n".join([f"**{section['title']}.** {section['text']}", *(one for one in tables if one)])


def _ratios(document: Document, tasks: list[Task], sides: list[str]) -> str:
    """How many times as fast as the task's reference, of which the seconds are shown."""
    if len(sides) > _MOST_COLUMNS:
        by_side = [(facts.label(document, side), *(_speed(task, side) for task in tasks)) for side in sides]
        return table(("side", *(task["what"] for task in tasks)), by_side)
    rows = [(task["what"], *(_speed(task, side) for side in sides)) for task in tasks]
    return table(("task", *(facts.label(document, side) for side in sides)), rows)


def _speed(task: Task, side: str) -> str:
    result = facts.results(task).get(side, {})
    if facts.timed(result) and "ratio" in result:
        return facts.ratio(result)
    if facts.timed(result) and "seconds" in result:
        return facts.seconds(result["seconds"])
    return facts.outputs(result) or "–"


def _caches(document: Document, tasks: list[Task], sides: list[str]) -> str:
    """Bytes of the largest cache, and how often each fits in the reference's."""

    def cell(task: Task, side: str) -> str:
        most, of = (facts.results(task)[name].get("cache_bytes") for name in (side, task["reference"]))
        if not most or not of:
            return "–"
        size = f"{most / 2**20:,.1f} MiB"
        return size if side == task["reference"] else f"{size}, {facts.times(of / most)} less"

    rows = [(task["what"], *(cell(task, side) for side in sides)) for task in tasks]
    return table(("caches", *(facts.label(document, side) for side in sides)), rows)


def _peaks(document: Document, tasks: list[Task], sides: list[str]) -> str:
    """The memory of each side's first call, above what the process held before it."""

    def cell(task: Task, side: str) -> str:
        most = facts.results(task).get(side, {}).get("peak_bytes")
        return f"{most / 2**20:,.0f} MiB" if most else "–"

    rows = [(task["what"], *(cell(task, side) for side in sides)) for task in tasks]
    return table(("memory of the first call", *(facts.label(document, side) for side in sides)), rows)


def _metrics(document: Document, tasks: list[Task]) -> str:
    rows = []
    for task in tasks:
        for side, result in facts.results(task).items():
            found = ", ".join(f"{name} {value:.4g}" for name, value in result.get("metrics", {}).items())
            outputs = "compared with" if side == task["reference"] else facts.outputs(result) or "–"
            rows.append((task["what"], facts.label(document, side), found or "–", outputs))
    return table(("task", "side", "quality", "outputs"), rows)
