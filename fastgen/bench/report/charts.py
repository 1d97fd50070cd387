"""Bars: ratios, phases and memory, one figure for each task. All figures of a section have one scale."""

from __future__ import annotations

from fastgen.bench.document import Document, Result, Task
from fastgen.bench.report import facts
from fastgen.bench.report.drawing import SMALL, Drawing, ticks, width_of
from fastgen.bench.report.markup import Html, figure, joined, swatches, tag
from fastgen.phases import PHASES
from fastgen.report import size

WIDTH, LABELS, ROW, BAR = 960, 244, 22, 13
_APART = 8  # tasks whose longest bars are further apart than this have a scale each


class Look:
    """The colour of each side, the same throughout: greys for references, blues for fastgen, others for the others."""

    _POOLS = ([0, 7], [1, 2], [3, 4, 5, 6])

    def __init__(self, document: Document) -> None:
        references = {facts.reference(task) for task in document["tasks"]}
        ours = facts.ours(document)
        pools = [list(pool) for pool in self._POOLS]
        self.number: dict[str, int] = {}
        for index, name in enumerate(document["sides"]):
            pool = pools[1 if name in ours else 0 if name in references else 2]
            free = pool or next((each for each in pools if each), [])
            self.number[name] = free.pop(0) if free else index % 8

    def fill(self, side: str) -> str:
        return f"fill{self.number.get(side, 0)}"


def named(document: Document, side: str) -> str:
    return facts.label(document, side) + (" (lossy)" if facts.lossy(document, side) else "")


def legend(document: Document, look: Look, sides: list[str]) -> Html:
    entries = []
    for side in sides:
        drawing = Drawing(14, 14, facts.label(document, side))
        drawing.box(1, 1, 12, 12, look.fill(side))
        if facts.lossy(document, side):
            drawing.hatch(1, 1, 12, 12)
        entries.append((drawing.svg("swatch"), named(document, side)))
    return swatches(entries)


def bar(
    drawing: Drawing, document: Document, look: Look, side: str, x: float, y: float, width: float, tip: str = ""
) -> None:
    drawing.box(x, y, width, BAR, look.fill(side), tip)
    if facts.lossy(document, side):
        drawing.hatch(x, y, width, BAR)


def scale(drawing: Drawing, marks: list[float], left: float, right: float, bottom: float, unit: str) -> None:
    """Lines of a horizontal scale and their numbers below."""
    for mark in marks:
        x = left + (right - left) * mark / marks[-1]
        drawing.line(x, 4, x, bottom, "grid")
        drawing.text(x, bottom + 14, f"{mark:g}{unit}", "faint", "middle", SMALL)


def caption(task: Task) -> Html:
    what = task.get("what", "")
    inside: list[str] = [tag("b", task["name"])]
    if what and what != task["name"]:
        inside += [tag("br"), what]
    return tag("span", *inside)


def refusals(document: Document, task: Task) -> list[Html]:
    return [
        joined([tag("b", named(document, side)), " refused: ", result["refused"]], "")
        for side, result in facts.results(task).items()
        if "refused" in result
    ]


def ratios(document: Document, tasks: list[Task], look: Look) -> Html:
    """How many times as fast as the reference each side is."""
    bars = [result for task in tasks for result in facts.results(task).values() if _has_bar(result)]
    marks = ticks(max([1.0, *(result["ratio"]["max"] for result in bars)]), 7)
    right = WIDTH - 12 - max((width_of(_beside(result)) for result in bars), default=0)
    return joined(_ratios(document, task, look, marks, right) for task in tasks)


def _has_bar(result: Result) -> bool:
    return facts.timed(result) and "ratio" in result


def _ratios(document: Document, task: Task, look: Look, marks: list[float], right: float) -> Html:
    reference = facts.reference(task)
    rows = [
        (side, result) for side, result in facts.results(task).items() if side != reference and "refused" not in result
    ]
    notes = refusals(document, task)
    if not rows:
        return tag("figure", tag("figcaption", caption(task)), *(tag("p", note, class_="note") for note in notes))
    left, bottom = LABELS, 20 + ROW * len(rows)
    name = facts.label(document, reference) if reference else "the reference"
    drawing = Drawing(WIDTH, bottom + 20, f"{task['name']}: how many times as fast as {name}")
    scale(drawing, marks, left, right, bottom, "x")
    one = left + (right - left) / marks[-1]
    drawing.line(one, 14, one, bottom, "one")
    drawing.fitted(one + 4, 11, f"1x: {name}", right - one, "faint")
    for index, (side, result) in enumerate(rows):
        y = 20 + ROW * index
        drawing.fitted(left - 8, y + 15, named(document, side), LABELS - 10, anchor="end")
        if not _has_bar(result):
            wrong = facts.differs(result)
            text = f"✗ outputs differ: {facts.outputs(result)}" if wrong else "not timed"
            drawing.text(left + 6, y + 15, text, "bad" if wrong else "faint")
            continue
        found = result["ratio"]
        median, least, largest = (
            left + (right - left) * value / marks[-1] for value in (found["median"], found["min"], found["max"])
        )
        bar(drawing, document, look, side, left, y + 4, median - left, facts.ratio(result))
        drawing.line(one, y + 1, one, y + ROW - 3, "one")
        drawing.whisker(least, largest, y + 4 + BAR / 2)
        drawing.text(largest + 10, y + 15, _beside(result), "number")
    return figure(drawing.svg(), caption(task), notes)


def _beside(result: Result) -> str:
    verified = result.get("verified")
    differs = verified and not verified["must"] and verified["different"]
    return facts.ratio(result) + (f", {facts.outputs(result)}" if differs else "")


def phases(document: Document, tasks: list[Task], look: Look) -> Html:
    """Where the seconds go, before and after."""
    shown = [task for task in tasks if any(result.get("phases") for result in facts.results(task).values())]
    if not shown:
        return Html("")
    longest = [max(_total(result) for result in facts.results(task).values()) for task in shown]
    together = max(longest) <= _APART * min(longest)
    used = [name for name in PHASES if any(_phase(result, name) for task in shown for result in task["sides"].values())]
    entries = []
    for name in used:
        drawing = Drawing(16, 16, name)
        number = PHASES.index(name)
        drawing.box(0, 0, 16, 16, f"phase{number}")
        drawing.text(8, 12, str(number + 1), f"on{number}", "middle", SMALL)
        entries.append((drawing.svg("swatch"), name))
    figures = [
        _phases(document, task, ticks(max(longest) if together else own, 7))
        for task, own in zip(shown, longest, strict=True)
    ]
    note = "All bars have one scale." if together else "Each task has a scale of its own."
    return joined([swatches(entries), tag("p", note, class_="note"), *figures])


def _phase(result: Result, name: str) -> float:
    return result.get("phases", {}).get(name, 0.0) if "refused" not in result else 0.0


def _total(result: Result) -> float:
    return sum(_phase(result, name) for name in PHASES)


def _phases(document: Document, task: Task, marks: list[float]) -> Html:
    rows = [(side, result) for side, result in facts.results(task).items() if result.get("phases")]
    left, right = LABELS, WIDTH - 90
    bottom = 6 + ROW * len(rows)
    drawing = Drawing(WIDTH, bottom + 20, f"{task['name']}: seconds by phase")
    scale(drawing, marks, left, right, bottom, " s")
    for index, (side, result) in enumerate(rows):
        y = 6 + ROW * index
        drawing.fitted(left - 8, y + 15, named(document, side), LABELS - 10, anchor="end")
        x = float(left)
        for number, name in enumerate(PHASES):
            width = (right - left) * _phase(result, name) / marks[-1]
            if width <= 0:
                continue
            drawing.box(x, y + 2, width, BAR + 4, f"phase{number}", f"{name}: {facts.seconds(_phase(result, name))}")
            if width > 13:
                drawing.text(x + width / 2, y + 15, str(number + 1), f"on{number}", "middle", SMALL)
            x += width
        drawing.text(x + 8, y + 15, facts.seconds(_total(result)), "number")
    return figure(drawing.svg(), caption(task))


KINDS_OF_MEMORY = {
    "cache_bytes": "cache at its largest",
    "peak_bytes": "first call, beyond what was loaded",
    "resident_bytes": "whole process",
}


def memory(document: Document, tasks: list[Task], look: Look) -> Html:
    """Bytes of the cache, of the first call and of the process, side by side on one scale."""
    return joined(_memory(document, task, look) for task in tasks)


def _bytes(result: Result, kind: str) -> int | None:
    count: int | None = result.get(kind)  # type: ignore[assignment]
    return count


def _memory(document: Document, task: Task, look: Look) -> Html:
    rows = [
        (side, result)
        for side, result in facts.results(task).items()
        if any(_bytes(result, kind) is not None for kind in KINDS_OF_MEMORY)
    ]
    if not rows:
        return Html("")
    most = max(_bytes(result, kind) or 0 for _, result in rows for kind in KINDS_OF_MEMORY) or 1
    panel = (WIDTH - LABELS) / len(KINDS_OF_MEMORY)
    drawing = Drawing(WIDTH, 26 + ROW * len(rows), f"{task['name']}: memory")
    for column, (kind, words) in enumerate(KINDS_OF_MEMORY.items()):
        left = LABELS + panel * column
        drawing.text(left, 12, words, "faint")
        drawing.line(left, 18, left, 22 + ROW * len(rows), "axis")
        for index, (side, result) in enumerate(rows):
            y = 20 + ROW * index
            if not column:
                drawing.fitted(LABELS - 8, y + 15, named(document, side), LABELS - 10, anchor="end")
            count = _bytes(result, kind)
            width = (panel - 100) * (count or 0) / most
            bar(drawing, document, look, side, left, y + 4, width)
            words = "not known" if count is None else size(count)
            drawing.text(left + width + 8, y + 15, words, "faint" if count is None else "number")
    return figure(drawing.svg(), caption(task))
