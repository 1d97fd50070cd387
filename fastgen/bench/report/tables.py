"""The report's tables: every figure's numbers, and what has no figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.bench.document import Document, Result, Task
from fastgen.bench.report import facts
from fastgen.bench.report.charts import KINDS_OF_MEMORY, named
from fastgen.bench.report.markup import Html, joined, table, tag
from fastgen.phases import PHASES
from fastgen.report import size

Row = list[str]
_LONG = 20  # letters: a longer line of a cell is broken


def bad(text: str) -> Html:
    return tag("span", f"✗ {text}", class_="bad")


def _rows(document: Document, tasks: list[Task], cells: Callable[[Task, str, Result], Row | None]) -> list[Row]:
    """A row for each side of each task: its name, the side's, and `cells`, or none if that is None."""
    rows = []
    for task in tasks:
        for side, result in facts.results(task).items():
            found = cells(task, side, result)
            if found is not None:
                rows.append([task["name"], named(document, side), *found])
    return rows


def _by_side(
    document: Document,
    tasks: list[Task],
    sides: list[str],
    caption: str,
    cell: Callable[[Task, str, Result], str],
    below: Callable[[str], str] | None = None,
) -> Html:
    """A row for each task, a column for each side; `below` says something of the side, under its name."""

    def place(task: Task, side: str) -> str:
        return cell(task, side, facts.results(task)[side]) if side in facts.results(task) else "–"

    def head(side: str) -> str:
        more = below(side) if below else ""
        return joined([named(document, side), *([tag("span", more, class_="below")] if more else [])], "")

    if not sides:
        return Html("")
    rows = [[task["name"], *(place(task, side) for side in sides)] for task in tasks]
    return table(caption, ["task", *map(head, sides)], rows)


def _lines(first: str, *more: str) -> Html:
    """A cell: the first line stands out."""
    return joined(
        [
            tag("b", first),
            *(tag("span", each, class_="below reason" if len(each) > _LONG else "below") for each in more),
        ],
        "",
    )


def _untimed(result: Result) -> str:
    return bad("outputs differ") if facts.differs(result) else "refused" if "refused" in result else "not timed"


def compared(tasks: list[Task], side: str) -> bool:
    """Whether it has a ratio, or would have one, in any of them."""
    return any(side != facts.reference(task) for task, _ in facts.results_of(tasks, side))


def ratios(document: Document, tasks: list[Task]) -> Html:
    def cell(task: Task, side: str, result: Result) -> str:
        if side == facts.reference(task):
            return "reference"
        if not facts.timed(result) or "ratio" not in result:
            return _untimed(result)
        return _lines(facts.times(result["ratio"]["median"]), facts.interval(result))

    sides = [side for side in facts.sides_of(document, tasks) if compared(tasks, side)]
    references = dict.fromkeys(name for name in map(facts.reference, tasks) if name)
    against = ", ".join(facts.label(document, name) for name in references)
    caption = f"Times as fast as the reference, {against}: median of the rounds, and the least to the largest"
    return _by_side(document, tasks, sides, caption, cell)


def seconds(document: Document, tasks: list[Task]) -> Html:
    def cell(task: Task, side: str, result: Result) -> str:
        if not facts.timed(result) or "seconds" not in result:
            return _untimed(result)
        spread = facts.spread(task, side)
        more = [f"{facts.number(spread[0])} to {facts.number(spread[1])}"] if spread else []
        more += [f"first {facts.number(result['first_seconds'])}"] if "first_seconds" in result else []
        return _lines(facts.seconds(result["seconds"]), *more)

    caption = (
        "Seconds: median of the rounds, the least to the largest, and the first call (warm-up, compilation and "
        "recording among it)"
    )
    return _by_side(document, tasks, facts.sides_of(document, tasks), caption, cell)


def phases(document: Document, tasks: list[Task]) -> Html:
    found = [result.get("phases", {}) for task in tasks for result in facts.results(task).values()]
    used = [name for name in PHASES if any(name in each for each in found)]

    def cells(task: Task, side: str, result: Result) -> Row | None:
        if not result.get("phases"):
            return None
        all_of_it = sum(result["phases"].get(name, 0.0) for name in PHASES)
        each = [_share(result["phases"].get(name), all_of_it) for name in used]
        return [*each, facts.number(all_of_it)]

    header = ["task", "side", *(f"{PHASES.index(name) + 1} {name}" for name in used), "all"]
    rows = _rows(document, tasks, cells)
    return table("Seconds by phase, and part of the whole", header, rows, 2, grouped=True)


def _share(value: float | None, whole: float) -> str:
    if value is None:
        return "–"
    return _lines(facts.number(value), f"{value / whole:.0%}" if whole else "")


def memory(document: Document, tasks: list[Task]) -> Html:
    def cells(task: Task, side: str, result: Result) -> Row | None:
        counts: list[Any] = [result.get(kind) for kind in KINDS_OF_MEMORY]
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
    excused = not result["verified"]["must"] or facts.near_ties(result)
    return text if excused else bad(text)


def outputs(document: Document, tasks: list[Task]) -> Html:
    def demand(result: Result) -> str:
        must = "must equal" if result["verified"]["must"] else "may differ from"
        return f"{must} {facts.label(document, result['verified']['against'])}"

    def demands(side: str) -> set[str]:
        return {demand(result) for _, result in facts.results_of(tasks, side) if "verified" in result}

    def below(side: str) -> str:
        return next(iter(demands(side))) if len(demands(side)) == 1 else ""

    def cell(task: Task, side: str, result: Result) -> str:
        if "refused" in result:
            return _lines("refused", result["refused"])
        if "verified" not in result:
            return "not compared"
        found = result["verified"]
        near = facts.near_ties(result)
        first = f"{found['outputs'] - len(found['different']) - len(near):,} of {found['outputs']:,} same"
        more = [f"output {number:,} at a near-tie" for number in near]
        more += [f"{facts.part(found['same_tokens'])} of tokens"] + ([] if below(side) else [demand(result)])
        return _lines(bad(first) if facts.differs(result) else first, *more)

    sides = [
        side
        for side in facts.sides_of(document, tasks)
        if any("verified" in result or "refused" in result for _, result in facts.results_of(tasks, side))
    ]
    caption = "Outputs that are the same, token for token, and the part of all tokens that are, beside another side's"
    return _by_side(document, tasks, sides, caption, cell, below)
