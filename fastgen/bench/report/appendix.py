"""The end of the report: how it was measured, with what, and every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastgen.bench.document import Document
from fastgen.bench.report import facts
from fastgen.bench.report.charts import named
from fastgen.bench.report.markup import Html, joined, table, tag
from fastgen.report import size


def method(document: Document) -> Html:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts: list[str] = [
        tag("h2", "How this was measured", id="method"),
        _list(document["statements"]),
        tag("h3", "Sides"),
        *(_side(document, name) for name in document["sides"]),
        tag("h3", "Machine, versions, settings"),
        tag("p", "Command: ", tag("code", document["command"])),
        tag("p", "Commit of fastgen: ", document.get("commit", "not recorded")),
        tag("p", "Machine: ", _pairs(document["machine"])),
        tag("p", "Settings: ", _pairs(document["settings"])),
        tag("p", "Versions: ", versions or "–"),
        tag("h3", "Tasks"),
        _tasks(document),
        _counted(document),
        tag("details", tag("summary", "Every round"), _rounds(document)),
    ]
    return tag("section", joined(parts))


def _list(statements: Iterable[str]) -> Html:
    items = [tag("li", each) for each in statements]
    return tag("ul", *items) if items else Html("")


def _side(document: Document, name: str) -> Html:
    versions = ", ".join(" ".join(pair) for pair in facts.side(document, name)["versions"].items())
    head = tag("p", tag("b", named(document, name)), f" ({name})" if name != named(document, name) else "")
    return joined([head, _list([*facts.side(document, name)["settings"], *([versions] if versions else [])])])


def _pairs(values: Mapping[str, Any]) -> str:
    words = []
    for key, value in values.items():
        bytes_of = key.endswith("_bytes") and isinstance(value, int)
        shown = size(value) if bytes_of else _words(value)
        words.append(f"{key.removesuffix('_bytes').replace('_', ' ')}: {shown}")
    return "; ".join(words) or "–"


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={each}" for key, each in value.items()) or "–"
    return "–" if value is None or value == "" else str(value)


def _tasks(document: Document) -> Html:
    rows = [
        [
            task["name"],
            task.get("what", "–"),
            task.get("weights", "–"),
            _words(task.get("shape", {})),
            _words(task.get("options", {})),
            facts.label(document, task["reference"]) if "reference" in task else "–",
        ]
        for task in document["tasks"]
    ]
    return table("Tasks", ["task", "what", "weights", "shape", "options", "reference"], rows, words=6)


def _counted(document: Document) -> Html:
    """fastgen's calls by tier, and with --counts what was counted."""
    rows = []
    for task in document["tasks"]:
        for side, result in facts.results(task).items():
            tiers = _words(result.get("tiers", {}))
            counts = ", ".join(f"{name} {count:,}" for name, count in result.get("counts", {}).items()) or "–"
            if (tiers, counts) != ("–", "–"):
                rows.append([task["name"], named(document, side), tiers, counts])
    return table("Calls by tier, and counts", ["task", "side", "calls by tier", "counts"], rows, 4, grouped=True)


def _rounds(document: Document) -> Html:
    sides = facts.sides_of(document, document["tasks"])
    rows = []
    for task in document["tasks"]:
        for index, each in enumerate(task.get("rounds", []), 1):
            cells = [_round(each["seconds"].get(side), each["other_processes"].get(side)) for side in sides]
            rows.append([task["name"], str(index), *cells])
    caption = (
        "Seconds, and in brackets the cores that other processes kept busy meanwhile (? where the system doesn't tell)"
    )
    header = ["task", "round", *(named(document, side) for side in sides)]
    return table(caption, header, rows, grouped=True)


def _round(seconds: float | None, cores: float | None) -> str:
    if seconds is None:
        return "–"
    beside = "?" if cores is None else f"{cores:.2f}"
    if cores is not None and cores > facts.BUSY:
        return joined([facts.seconds(seconds), " ", tag("b", f"({beside}!)", class_="busy")], "")
    return f"{facts.seconds(seconds)} ({beside})"
