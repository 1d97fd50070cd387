"""The report of a run: one HTML page that needs nothing beside it, neither scripts nor the network."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fastgen.bench.document import Document, Section, Task
from fastgen.bench.report import charts, facts, growth, summary, tables
from fastgen.bench.report.appendix import method
from fastgen.bench.report.charts import Look
from fastgen.bench.report.markup import Html, joined, tag
from fastgen.bench.report.style import sheet

Tasks = list[Task]


def _with_figures(
    figures: Callable[[Document, Tasks, Look], Html], numbers: Callable[[Document, Tasks], Html]
) -> Callable[[Document, Tasks, Look], Html]:
    def both(document: Document, tasks: Tasks, look: Look) -> Html:
        return joined([figures(document, tasks, look), numbers(document, tasks)])

    return both


def _ratios(document: Document, tasks: Tasks, look: Look) -> Html:
    sides = [side for side in facts.sides_of(document, tasks) if tables.compared(tasks, side)]
    if not sides:
        return Html("")
    note = (
        "Bars are medians of the rounds of the reference's seconds / the side's; whiskers reach from the least round "
        "to the largest. Right of 1x a side is faster than the reference. Hatched: computed with less precision."
    )
    parts = [charts.legend(document, look, sides), tag("p", note, class_="note"), charts.ratios(document, tasks, look)]
    return joined([*parts, tables.ratios(document, tasks)])


# By the names that a section's `show` has.
SHOWN: dict[str, Callable[[Document, Tasks, Look], Html]] = {
    "ratios": _ratios,
    "lines": growth.charts,
    "phases": _with_figures(charts.phases, tables.phases),
    "memory": _with_figures(charts.memory, tables.memory),
    "seconds": lambda document, tasks, look: tables.seconds(document, tasks),
    "metrics": lambda document, tasks, look: tables.metrics(document, tasks),
    "outputs": lambda document, tasks, look: tables.outputs(document, tasks),
}


def _section(document: Document, section: Section, number: int, look: Look) -> Html:
    tasks = facts.tasks_of(document, section)
    parts: list[str] = [tag("h2", section["title"], id=f"section-{number}")]
    parts += [tag("p", text) for text in section["text"].split("\n\n") if text]
    missing = [name for name in section["tasks"] if name not in {task["name"] for task in tasks}]
    if missing:
        parts.append(tag("p", f"Not in this run: {', '.join(missing)}.", class_="note"))
    for name in section["show"] if tasks else []:
        if name not in SHOWN:
            parts.append(tag("p", f"This version doesn't know how to show “{name}”.", class_="bad"))
            continue
        parts.append(SHOWN[name](document, tasks, look) or tag("p", f"No {name} in this run.", class_="note"))
    return tag("section", joined(parts))


def _where(document: Document) -> str:
    """When and on what."""
    machine = document["machine"]
    try:
        date = f"{datetime.fromisoformat(document['date']):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        date = document["date"]
    device = machine.get("device")
    parts = [date, machine.get("cpu"), f"{machine['threads']} threads" if "threads" in machine else None]
    return ", ".join(str(each) for each in [*parts, "no GPU used" if device == "cpu" else device] if each)


def render(document: Document) -> str:
    """A complete page."""
    look = Look(document)
    shown = facts.sections(document)
    title = f"fastgen-bench: {document['suite']}"
    entries = [tag("li", tag("a", each["title"], href=f"#section-{i}")) for i, each in enumerate(shown, 1)]
    entries.append(tag("li", tag("a", "How this was measured", href="#method")))
    said = [tag("li", each.text, class_="bad" if each.wrong else "") for each in summary.sentences(document)]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title}, {document['date']}"),
        tag("style", Html("\n" + sheet() + "\n")),
    )
    body = tag(
        "body",
        joined(
            [
                tag("header", tag("h1", title), tag("p", _where(document), class_="under")),
                tag("div", tag("ul", *said), class_="summary"),
                tag("nav", tag("ul", *entries), **{"aria-label": "Contents"}),
                *(_section(document, section, number, look) for number, section in enumerate(shown, 1)),
                method(document),
            ]
        ),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def write(document: Document, path: Path) -> None:
    """The page as a file; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(document), "utf-8")
