"""The report's tables: every figure's numbers, and what has no figure."""

from __future__ import annotations

from collections.abc import Callable

from fastgen.bench import facts
from fastgen.bench.charts import KINDS_OF_MEMORY, named
from fastgen.bench.document import PHASES, Document, Result, Task
from fastgen.bench.markup import Html, joined, table, tag
from fastgen.report import size

Row = list[str]


def bad(text: str) -> Html:
    return tag("span", f"✗ {text}", class_="bad")


def verdict(result: Result) -> str:
    """How the outputs compare; red where they must be equal and are not."""
    return bad(facts.outputs(result)) if facts.differs(result) else facts.outputs(result) or "–"


def _rows(document: Document, tasks: list[Task], cells: Callable[[Task, str, Result], Row | None]) -> list[Row]:
    """A row for each side of each task: its name, the side's, and `cells`, or none if that is None."""
    rows = []
    for task in tasks:
        for side, result in facts.results(task).items():
            found = cells(task, side, result)
            if found is not None:
                rows.append([task["name"], named(document, side), *found])
    return rows


def ratios(document: Document, tasks: list[Task]) -> Html:
    sides = [
        side
        for side in facts.sides_of(document, tasks)
        if any(side != facts.reference(task) for task, _ in facts.results_of(tasks, side))
    ]

    def cell(task: Task, side: str) -> str:
        result = facts.results(task).get(side)
        if result is None or side == facts.reference(task):
            return "–"
        if not facts.timed(result):
            return "refused" if "refused" in result else bad(f"outputs differ: {facts.outputs(result)}")
        return facts.ratio(result) if "ratio" in result else "not timed"

    rows = [[task["name"], _reference(document, task), *(cell(task, side) for side in sides)] for task in tasks]
    header = ["task", "reference (1x)", *(named(document, side) for side in sides)]
    return table("Times as fast as the reference: median of the rounds (least to largest)", header, rows, words=2)


def _reference(document: Document, task: Task) -> str:
    name = facts.reference(task)
    return facts.label(document, name) if name else "–"


def seconds(document: Document, tasks: list[Task]) -> Html:
    def cells(task: Task, side: str, result: Result) -> Row:
        if not facts.timed(result):
            why = bad("outputs differ") if facts.differs(result) else "refused"
            return [why, "–", "–", facts.seconds(result.get("first_seconds"))]
        low, high = facts.spread(task, side) or (None, None)
        return [facts.seconds(value) for value in (result.get("seconds"), low, high, result.get("first_seconds"))]

    header = ["task", "side", "median", "least", "largest", "first call"]
    caption = "Seconds of the rounds, and of the first call (warm-up, compilation and recording among it)"
    return table(caption, header, _rows(document, tasks, cells), 2, grouped=True)


def phases(document: Document, tasks: list[Task]) -> Html:
    found = [result.get("phases", {}) for task in tasks for result in facts.results(task).values()]
    used = [name for name in PHASES if any(name in each for each in found)]

    def cells(task: Task, side: str, result: Result) -> Row | None:
        if not result.get("phases"):
            return None
        all_of_it = sum(result["phases"].get(name, 0.0) for name in PHASES)
        each = [_share(result["phases"].get(name), all_of_it) for name in used]
        return [*each, facts.seconds(all_of_it)]

    header = ["task", "side", *(f"{PHASES.index(name) + 1} {name}" for name in used), "all"]
    rows = _rows(document, tasks, cells)
    return table("Seconds by phase, and part of the whole", header, rows, 2, grouped=True)


def _share(value: float | None, whole: float) -> str:
    if value is None:
        return "–"
    return joined([facts.seconds(value), tag("br"), f"{value / whole:.0%}" if whole else ""], "")


def memory(document: Document, tasks: list[Task]) -> Html:
    def cells(task: Task, side: str, result: Result) -> Row | None:
        counts = [result.get("cache_bytes"), result.get("peak_bytes")]
        if "refused" in result or counts == [None, None]:
            return None
        return [text for count in counts for text in (("–", "–") if count is None else (size(count), f"{count:,}"))]

    header = ["task", "side"] + [text for words in KINDS_OF_MEMORY.values() for text in (words, "bytes")]
    return table("Memory", header, _rows(document, tasks, cells), 2, grouped=True)


def metrics(document: Document, tasks: list[Task]) -> Html:
    all_metrics = [result.get("metrics", {}) for task in tasks for result in facts.results(task).values()]
    names = list(dict.fromkeys(name for each in all_metrics for name in each))

    def cells(task: Task, side: str, result: Result) -> Row | None:
        if not result.get("metrics"):
            return None
        each = [f"{result['metrics'][name]:.6g}" if name in result["metrics"] else "–" for name in names]
        return [*each, _as_the_other(document, task, result)]

    rows = _rows(document, tasks, cells)
    return table("Quality of the outputs", ["task", "side", *names, "metrics"], rows, 2, grouped=True)


def _as_the_other(document: Document, task: Task, result: Result) -> str:
    if "verified" not in result:
        return "–"
    other = result["verified"]["against"]
    expected = facts.results(task).get(other, {}).get("metrics")
    if expected is None:
        return "–"
    if expected == result["metrics"]:
        return f"identical to {facts.label(document, other)}"
    text = f"not those of {facts.label(document, other)}"
    return bad(text) if result["verified"]["must"] else text


def outputs(document: Document, tasks: list[Task]) -> Html:
    def cells(task: Task, side: str, result: Result) -> Row | None:
        if "refused" in result:
            return ["–", "–", joined(["refused: ", result["refused"]], ""), "–", "–", "–"]
        if "verified" not in result:
            return ["–", "–", "the others are compared with it", "–", "–", "–"]
        found = result["verified"]
        against = facts.label(document, found["against"])
        must = "yes" if found["must"] else "no"
        counts = [f"{found['outputs']:,}", f"{len(found['different']):,}", facts.part(found["same_tokens"])]
        return [against, must, verdict(result), *counts]

    header = ["task", "side", "compared with", "must be equal", "verdict", "outputs", "that differ", "same tokens"]
    return table("Outputs beside those of another side", header, _rows(document, tasks, cells), 5, grouped=True)
