"""HTML from Python: whatever isn't `Html` already is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

_NO_END = ("br", "meta")


class Html(str):
    """Text that is HTML."""


def safe(text: str) -> Html:
    return text if isinstance(text, Html) else Html(escape(text))


def joined(parts: Iterable[str], between: str = "\n") -> Html:
    return Html(between.join(safe(part) for part in parts if part))


def tag(name: str, /, *children: str, **attributes: str | bool) -> Html:
    """An element; a trailing underscore of an attribute's name is dropped (`class_`)."""
    inside = "".join(
        f" {key.rstrip('_')}" if value is True else f' {key.rstrip("_")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not False and value != ""
    )
    if name in _NO_END:
        return Html(f"<{name}{inside}>")
    return Html(f"<{name}{inside}>{joined(children, '')}</{name}>")


def table(
    caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, grouped: bool = False
) -> Html:
    """A table that scrolls within its own box. The first `words` columns are text, the others numbers, to the right.
    `grouped`: rows with the same first cell share it."""
    if not rows:
        return Html("")

    def kind(column: int) -> str:
        return "" if column < words else "n"

    head = tag("tr", *(tag("th", cell, class_=kind(i), scope="col") for i, cell in enumerate(header)))
    bodies = []
    for _, group in groupby(enumerate(rows), key=lambda row: row[1][0] if grouped else row[0]):
        lines = []
        members = [row for _, row in group]
        for index, row in enumerate(members):
            cells = [tag("td", cell, class_=kind(i)) for i, cell in enumerate(row) if i]
            if not index:
                span = str(len(members)) if len(members) > 1 else ""
                cells.insert(0, tag("th", row[0], scope="rowgroup" if span else "row", rowspan=span))
            lines.append(tag("tr", *cells))
        bodies.append(tag("tbody", *lines) if grouped else joined(lines))
    body = joined(bodies) if grouped else tag("tbody", *bodies)
    inside = tag("table", tag("caption", caption), tag("thead", head), body)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", **{"aria-label": caption})


def figure(picture: str, caption: str = "", notes: Iterable[str] = ()) -> Html:
    """`picture` is SVG; in a narrow window it scrolls within its own box."""
    box = tag("div", Html(picture), class_="scroll", tabindex="0")
    words = tag("figcaption", caption) if caption else Html("")
    return tag("figure", words, box, *(tag("p", note, class_="note") for note in notes))


def swatches(entries: Iterable[tuple[str, str]]) -> Html:
    """A legend: the SVG of each mark, and its name."""
    return tag("ul", *(tag("li", Html(mark), " ", name) for mark, name in entries), class_="legend")
