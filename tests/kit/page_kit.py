"""A page taken apart: its elements, its tables, its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

EMPTY = ("br", "meta")


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str = "", kind: str = "") -> list[Element]:
        """Elements below this one, by name and by class."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if name in ("", child.name) and (not kind or kind in child.kinds):
                    found.append(child)
                found += child.all(name, kind)
        return found

    @property
    def kinds(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        """Without the tips of shapes."""
        return " ".join(self._texts())

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield from filter(None, [child.strip()])
            elif child.name not in ("title", "style"):
                yield from child._texts()

    def number(self, attribute: str) -> float:
        return float(self.attributes[attribute])

    def points(self) -> list[tuple[float, float]]:
        """Of a path of straight lines."""
        places = self.attributes["d"].replace("M", "").replace("Z", "").split("L")
        return [(float(x), float(y)) for x, y in (place.split() for place in places)]

    def box(self) -> tuple[float, float]:
        x, y, width, height = map(float, self.attributes["viewbox"].split())
        assert (x, y) == (0, 0)
        return width, height


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs})
        self.open[-1].children.append(element)
        if tag not in EMPTY:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> ends <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(page: str) -> Element:
    """The page, whose every element must have an end of its own."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].name}> has no end"
    return parser.open[0]


def section(page: Element, title: str) -> Element:
    return next(each for each in page.all("section") if each.all("h2")[0].text == title)


def tables(below: Element) -> dict[str, list[list[str]]]:
    """Rows of text by the first words of the caption, up to a colon or comma; shared first cells are in each row."""
    found = {}
    for table in below.all("table"):
        rows: list[list[str]] = []
        shared, left = "", 0
        for row in table.all("tr"):
            cells = [cell.text for cell in row.all() if cell.name in ("th", "td")]
            if left:
                cells.insert(0, shared)
                left -= 1
            else:
                shared = cells[0]
                left = int(next((each.attributes.get("rowspan", "1") for each in row.all("th")), "1")) - 1
            rows.append(cells)
        found[table.all("caption")[0].text.split(":")[0].split(",")[0]] = rows
    return found


def row(table: list[list[str]], *first: str) -> dict[str, str]:
    """The row that begins with these cells, by the header's."""
    (cells,) = [each for each in table if tuple(each[: len(first)]) == first]
    return dict(zip(table[0], cells, strict=True))


def figure(below: Element, task: str) -> Element:
    return next(each for each in below.all("figure") if each.all("b") and each.all("b")[0].text == task)
