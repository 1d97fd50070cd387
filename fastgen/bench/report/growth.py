"""Growth: seconds over a quantity such as beams or the source's length, a chart for each line of a grid."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.bench.document import Document, Task
from fastgen.bench.report import facts
from fastgen.bench.report.charts import Look, named
from fastgen.bench.report.drawing import SMALL, Drawing, ticks, width_of
from fastgen.bench.report.markup import Html, figure, joined, swatches, table, tag

WIDTH, HEIGHT = 430, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 46


@dataclass(frozen=True)
class Point:
    x: int  # the shape along the axis
    seconds: float  # median of the rounds
    least: float
    largest: float


def lines(tasks: list[Task]) -> dict[tuple[str, str], list[Task]]:
    """Tasks that have a place along an axis, by axis and line, in order of their place."""
    found: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        if "axis" in task and task["axis"] in task.get("shape", {}):
            found.setdefault((task["axis"], task.get("line", "")), []).append(task)
    return {key: sorted(line, key=_place) for key, line in found.items()}


def _place(task: Task) -> int:
    return task["shape"][task["axis"]]


def curve(line: list[Task], side: str) -> list[Point]:
    points = []
    for task, result in facts.results_of(line, side):
        if facts.timed(result) and "seconds" in result:
            middle = result["seconds"]
            least, largest = facts.spread(task, side) or (middle, middle)
            points.append(Point(_place(task), middle, min(least, middle), max(largest, middle)))
    return points


def charts(document: Document, tasks: list[Task], look: Look) -> Html:
    found = lines(tasks)
    if not found:
        return Html("")
    sides = facts.sides_of(document, tasks)
    entries = []
    for side in sides:
        drawing = Drawing(30, 14, facts.label(document, side))
        number = look.number.get(side, 0)
        drawing.line(0, 7, 30, 7, f"curve line{number}")
        drawing.marker(15, 7, number)
        entries.append((drawing.svg("swatch"), named(document, side)))
    pictures = [_chart(document, axis, line, members, sides, look) for (axis, line), members in found.items()]
    note = "Medians of the rounds; bands reach from the least to the largest. Each chart has a scale of its own."
    grid = tag("div", *pictures, class_="charts")
    return joined([swatches(entries), tag("p", note, class_="note"), grid, tables(document, tasks)])


def _chart(document: Document, axis: str, line: str, members: list[Task], sides: list[str], look: Look) -> Html:
    curves = {side: curve(members, side) for side in sides}
    places = sorted({_place(task) for task in members})
    marks = ticks(max((point.largest for points in curves.values() for point in points), default=1.0), 4)
    drawing = Drawing(WIDTH, HEIGHT, f"{line or 'all tasks'}: seconds by {axis}")
    first, last = (min(0, places[0]), places[-1]) if places[-1] > 0 else (places[0] - 1, places[-1] + 1)
    bottom = HEIGHT - BOTTOM

    def at(place: float, seconds: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (place - first) / (last - first)
        return x, bottom - (bottom - TOP) * seconds / marks[-1]

    for mark in marks:
        _, y = at(first, mark)
        drawing.line(LEFT, y, WIDTH - RIGHT, y, "grid")
        drawing.text(LEFT - 6, y + 4, f"{mark:g} s", "faint", "end", SMALL)
    drawing.line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis")
    free = float(WIDTH)
    for place in reversed(places):  # where numbers would touch, the larger one is written
        x, _ = at(place, 0)
        drawing.line(x, bottom, x, bottom + 4, "axis")
        half = width_of(str(place), SMALL) / 2
        if x + half <= free:
            drawing.text(min(x, WIDTH - half), bottom + 16, str(place), "faint", "middle", SMALL)
            free = x - half - 4
    drawing.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, f"{axis} →", "faint", "middle")
    for side, points in curves.items():
        if len(points) > 1:
            around = [at(point.x, point.largest) for point in points]
            around += [at(point.x, point.least) for point in reversed(points)]
            drawing.path(around, f"band {look.fill(side)}", closed=True)
    for side, points in curves.items():
        number = look.number.get(side, 0)
        if len(points) > 1:
            drawing.path([at(point.x, point.seconds) for point in points], f"curve line{number}")
        for point in points:
            drawing.line(*at(point.x, point.least), *at(point.x, point.largest), f"curve line{number}")
            drawing.marker(*at(point.x, point.seconds), number)
    wrong = [
        f"{facts.label(document, side)} at {axis} {_place(task)}: {_why(task, side)}"
        for side in sides
        for task, result in facts.results_of(members, side)
        if not facts.timed(result)
    ]
    notes = [tag("span", "Not drawn: " + "; ".join(wrong), class_="bad")] if wrong else []
    return figure(drawing.svg(), tag("b", line or f"by {axis}"), notes)


def _why(task: Task, side: str) -> str:
    result = facts.results(task)[side]
    return f"refused ({result['refused']})" if "refused" in result else f"outputs differ ({facts.outputs(result)})"


def tables(document: Document, tasks: list[Task]) -> Html:
    """Seconds by line and place, and where several lines have one axis, fastgen's ratios as a grid."""
    found = lines(tasks)
    sides = facts.sides_of(document, tasks)
    parts = []
    for axis in dict.fromkeys(axis for axis, _ in found):
        members = {line: group for (each, line), group in found.items() if each == axis}
        rows = [
            [line, str(_place(task)), *(_cell(task, side) for side in sides)]
            for line, group in members.items()
            for task in group
        ]
        header = ["line", axis, *(named(document, side) for side in sides)]
        caption = f"Seconds by {axis}: median (least to largest), and ratio"
        if len(members) > 1:
            ours = [side for side in facts.ours(document) if side in sides]
            parts += [_grid(document, side, axis, members) for side in ours]
        parts.append(table(caption, header, rows, grouped=True))
    return joined(parts)


def _cell(task: Task, side: str) -> str:
    result = facts.results(task).get(side, {})
    if facts.differs(result):
        return tag("span", f"✗ {facts.outputs(result)}", class_="bad")
    if "refused" in result:
        return "refused"
    if "seconds" not in result:
        return "–"
    low, high = facts.spread(task, side) or (result["seconds"], result["seconds"])
    words = [f"{facts.seconds(result['seconds'])} ({facts.number(low)} to {facts.number(high)})"]
    if "ratio" in result and side != facts.reference(task):
        words += [tag("br"), tag("b", facts.times(result["ratio"]["median"]))]
    return joined(words, "")


def _grid(document: Document, side: str, axis: str, members: dict[str, list[Task]]) -> Html:
    places = sorted({_place(task) for group in members.values() for task in group})
    found = {
        (line, _place(task)): (task, result)
        for line, group in members.items()
        for task, result in facts.results_of(group, side)
    }
    top = max((result["ratio"]["median"] for _, result in found.values() if "ratio" in result), default=1.0)

    def cell(line: str, place: int) -> str:
        task, result = found.get((line, place), (None, None))
        if task is None or result is None or not facts.timed(result) or "ratio" not in result:
            return _cell(task, side) if task else "–"
        median = result["ratio"]["median"]
        shade = round(9 * (median - 1) / (top - 1)) if top > 1 and median > 1 else 0
        return tag("span", facts.times(median), class_=f"heat heat{shade}" if median >= 1 else "heat slower")

    rows = [[line, *(cell(line, place) for place in places)] for line in members]
    references = {facts.reference(task) or "" for group in members.values() for task in group}
    against = " or ".join(facts.label(document, name) for name in sorted(references))
    title = f"{facts.label(document, side)}: times as fast as {against}, by {axis}"
    return table(title, [f"line / {axis}", *map(str, places)], rows)
