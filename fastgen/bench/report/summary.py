"""A run in a few sentences, and as a table for the terminal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fastgen.bench.document import Document, Result, Task
from fastgen.bench.report import facts


@dataclass(frozen=True)
class Sentence:
    text: str
    wrong: bool = False  # it says that the run failed or should be repeated


def sentences(document: Document) -> list[Sentence]:
    """What a reader must know, in plain words."""
    if not document["tasks"]:
        return [Sentence("No task was run.", wrong=True)]
    sides = facts.sides_of(document, document["tasks"])
    ours = facts.ours(document)
    sides.sort(key=lambda name: name not in ours)
    names = "; ".join(facts.label(document, name) for name in sides)
    found = [
        Sentence(f"{facts.counted(len(document['tasks']), 'task')}. Sides: {names}. Ratios are medians of rounds.")
    ]
    if document["settings"].get("quick"):
        found.append(Sentence("A quick run: it shows that everything works; its figures are not to be quoted.", True))
    for name in sides:
        found += _speed(document, name)
    found += _equality(document)
    for name in sides:
        refused = [task for task, result in facts.results_of(document["tasks"], name) if "refused" in result]
        if refused:
            done = facts.counted(len(refused), "task")
            found.append(
                Sentence(f"{facts.label(document, name)} refused {done}; the reasons stand below the figures.")
            )
    return [*found, _quiet(document)]


def checks(document: Document) -> list[Sentence]:
    """Whether outputs were equal, and the machine quiet."""
    return [*_equality(document), _quiet(document)]


def _speed(document: Document, name: str) -> list[Sentence]:
    """One for each side that it is compared with."""
    found = []
    references = dict.fromkeys(facts.reference(task) for task in document["tasks"])
    for other in references:
        ratios = [
            (result["ratio"]["median"], task["name"])
            for task, result in facts.results_of(document["tasks"], name)
            if facts.reference(task) == other and other != name and "ratio" in result and facts.timed(result)
        ]
        if not ratios or other is None:
            continue
        (low, worst), (high, best) = min(ratios), max(ratios)
        middle = statistics.median(value for value, _ in ratios)
        faster = f"times as fast as {facts.label(document, other)}"
        text = f"{low:.2f} {faster} in “{worst}”"
        if len(ratios) > 1:
            text = f"{low:.2f} to {high:.2f} {faster}, {middle:.2f} in the middle of {len(ratios):,} tasks"
            text += f". Least in “{worst}”, most in “{best}”"
        lossy = " It computes with less precision." if facts.lossy(document, name) else ""
        found.append(Sentence(f"{facts.label(document, name)}: {text}.{lossy}"))
    return found


def _equality(document: Document) -> list[Sentence]:
    found = [
        (task, name, result)
        for name in facts.sides_of(document, document["tasks"])
        for task, result in facts.results_of(document["tasks"], name)
        if "verified" in result and result["verified"]["must"]
    ]
    if not found:
        return [Sentence("No outputs had to be equal to another side's.")]
    wrong = [(task, name, result) for task, name, result in found if facts.differs(result)]
    if wrong:
        where = "; ".join(f"{facts.label(document, n)}, {task['name']}: {facts.outputs(r)}" for task, n, r in wrong)
        return [Sentence(f"Outputs that must be equal are NOT: {where}. Their times are not shown.", wrong=True)]
    near = sum(len(facts.near_ties(result)) for _, _, result in found)
    count = sum(result["verified"]["outputs"] for _, _, result in found) - near
    names = "; ".join(facts.label(document, name) for name in dict.fromkeys(name for _, name, _ in found))
    text = f"All outputs that must be equal are equal, token for token: {count:,} outputs ({names})."
    if near:
        text += (
            f" Besides, {near:,} differ at near-ties of the host's: it gives the same as fastgen itself where rounding "
            "moves its weights."
        )
    return [Sentence(text)]


def _quiet(document: Document) -> Sentence:
    timings, loud, unknown, most = facts.busy(document)
    if not timings:
        return Sentence("Nothing was timed.", wrong=True)
    unsaid = f" For {unknown:,} it isn't known." if unknown else ""
    if unknown == timings:
        return Sentence("This system doesn't tell how busy other processes kept the machine meanwhile.", wrong=True)
    if loud:
        text = (
            f"In {loud:,} of {timings:,} timings other processes kept more than {facts.BUSY} cores busy (up to "
            f"{most:.2f}): measure again what they touch; the table of rounds marks them.{unsaid}"
        )
        return Sentence(text, wrong=True)
    text = (
        f"The machine was quiet: in none of {timings:,} timings did other processes keep more than {facts.BUSY} cores"
    )
    return Sentence(f"{text} busy (at most {most:.2f}).{unsaid}")


def table(document: Document) -> str:
    """The run for a terminal: by section a line for each side of each task, then the sentences. A task that stands in
    several sections is listed in the first."""
    parts, listed = [], set()
    for section in facts.sections(document):
        rows: list[tuple[str, ...]] = [("task", "outputs", "seconds", "ratio (min to max)")]
        for task in facts.tasks_of(document, section):
            if task["name"] not in listed:
                listed.add(task["name"])
                rows.append((task["name"], "", "", ""))
                rows += [_line(document, task, side, result) for side, result in facts.results(task).items()]
        if len(rows) > 1:
            parts.append(f"{section['title']}\n\n{aligned(rows)}")
    parts.append("\n".join(each.text for each in sentences(document)))
    return "\n\n".join(parts)


def _line(document: Document, task: Task, side: str, result: Result) -> tuple[str, ...]:
    name = "  " + facts.label(document, side)
    if "refused" in result:
        return name, f"refused: {result['refused']}", "", ""
    if facts.differs(result):
        return name, facts.outputs(result), "", ""
    ratio = facts.ratio(result) if "ratio" in result and side != facts.reference(task) else ""
    return name, facts.outputs(result), facts.seconds(result["seconds"]) if "seconds" in result else "", ratio


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns, numbers to the right; below the first row a line. Text with nothing after it may pass its column."""
    widths = [0] * len(rows[0])
    for row in rows:
        for column, cell in enumerate(row):
            if any(row[column + 1 :]) or column == len(row) - 1:
                widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)
