"""The report of `fastgen-demo`: what ran on both sides, as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fastgen.bench import machine
from fastgen.bench.report.charts import scale
from fastgen.bench.report.drawing import Drawing, ticks
from fastgen.bench.report.markup import Html, figure, joined, table, tag
from fastgen.bench.report.style import sheet
from fastgen.demo import page
from fastgen.demo.comparison import SIDES, Result

_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 720, 90, 560, 30, 18
_FILL = {"stock": "fill0", "fastgen": "fill1"}


def render(results: Sequence[Result], samples: int) -> str:
    """A complete page; `samples`: how many outputs of each result it shows."""
    title = "fastgen-demo: stock and fastgen, compared"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html("\n" + sheet() + "\n")),
    )
    where = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}, {machine.cpu()}, {machine.cores()} cores"
    said = [
        tag("li", f"{result.job.host}: {page.conclusion(result)}", class_="" if result.all_identical else "bad")
        for result in results
    ]
    top = [tag("header", tag("h1", title), tag("p", where, class_="under"))]
    top.append(tag("div", tag("ul", *said), class_="summary"))
    body = tag("body", joined([*top, *(_section(result, samples) for result in results)]))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _section(result: Result, samples: int) -> Html:
    found, notes = page.rows(result)
    ran = page.tiers(result) or [page.why_nothing_ran(result)]
    parts = [
        tag("h2", result.job.host),
        tag("ul", *(tag("li", tag("b", name), f": {text}") for name, text in page.facts(result.job).items())),
        figure(_bars(result), "Seconds of both sides: shorter is faster."),
        table("Stock beside fastgen", ["", *SIDES, ""], [row.cells for row in found]),
        *(tag("p", note, class_="note") for note in notes),
        tag("h3", "What ran on fastgen's side"),
        tag("ul", *(tag("li", line) for line in ran)),
        tag("h3", "Outputs"),
        _outputs(result, samples),
    ]
    return tag("section", joined(parts))


def _bars(result: Result) -> str:
    """A bar for the seconds of each side; whether the outputs are equal stands beside fastgen's."""
    seconds = [result.sides[name].seconds for name in SIDES]
    marks = ticks(max(seconds))
    bottom = 10 + _ROW * len(SIDES)
    ratio = page.times(result.speed_up, "faster")
    drawing = Drawing(
        _WIDTH, bottom + 20, f"Stock took {seconds[0]:.2f} s, fastgen {seconds[1]:.2f} s: {ratio}. {_equal(result)}."
    )
    scale(drawing, marks, _LEFT, _RIGHT, bottom, " s")
    for index, (name, taken) in enumerate(zip(SIDES, seconds, strict=True)):
        y = 10 + _ROW * index
        width = (_RIGHT - _LEFT) * taken / marks[-1]
        drawing.text(_LEFT - 8, y + 14, name, anchor="end")
        drawing.box(_LEFT, y, width, _BAR, _FILL[name], f"{taken:.2f} s")
        beside = f"{taken:.2f} s" if name == "stock" else f"{taken:.2f} s, {ratio}"
        drawing.text(_LEFT + width + 8, y + 14, beside, "number")
    return drawing.svg()


def _equal(result: Result) -> str:
    total = len(result.job.sources)
    return f"{result.identical} of {total} outputs are identical"


def _outputs(result: Result, samples: int) -> Html:
    """Some outputs of both sides, with the first that differs."""
    stock, ours = (result.sides[name] for name in SIDES)
    chosen = page.shown(result, samples)
    if not result.all_identical:
        chosen = sorted({*chosen, page.first_difference(result)})
    rows = [
        [result.job.sources[i], ours.texts[i], page.mark(result, i) or "–", _same(result, i, stock.texts[i])]
        for i in chosen
    ]
    caption = f"{_equal(result)}; {len(rows)} of them:"
    return table(caption, ["input", "fastgen's output", "known answer", "stock's output"], rows, words=4)


def _same(result: Result, index: int, stock: str) -> str:
    """Stock's output beside fastgen's."""
    sides = result.sides
    if sides["stock"].tokens[index] == sides["fastgen"].tokens[index]:
        return "the same"
    return tag("span", stock, class_="bad")
