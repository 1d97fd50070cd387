"""Pictures as SVG text: shapes, words that fit, and scales."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, field
from html import escape

SMALL, TEXT = 11, 12  # sizes of letters, in units of the picture
HATCH = 6  # between the lines of a hatched box


@dataclass
class Drawing:
    """A picture of `width` x `height` units. Colours are classes of the page's style sheet, for light and dark."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        where = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(height)}"'
        self.parts.append(f'<rect class="{kind}" {where}>{inside}</rect>')

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        """Diagonals over a box: the mark of a lossy side, which does not depend on colours."""
        offset = HATCH / 2
        while offset < width + height:
            x1, x2 = max(0.0, offset - height), min(width, offset)
            self.line(x + x1, y + offset - x1, x + x2, y + offset - x2, "hatch")
            offset += HATCH

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="M{_n(x1)} {_n(y1)} L{_n(x2)} {_n(y2)}"/>')

    def path(self, points: list[tuple[float, float]], kind: str, closed: bool = False) -> None:
        where = " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{where}{" Z" if closed else ""}"/>')

    def text(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", size: int = TEXT, tip: str = ""
    ) -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(text)}{inside}</text>"
        )

    def fitted(self, x: float, y: float, text: str, width: float, kind: str = "", anchor: str = "start") -> None:
        """Text cut to `width`; the whole of it shows under the pointer."""
        short = cut(text, width)
        self.text(x, y, short, kind, anchor, tip=text if short != text else "")

    def whisker(self, x1: float, x2: float, y: float) -> None:
        """The range from `x1` to `x2`."""
        for kind in ("halo", "ink"):  # the halo keeps it visible on any bar
            self.line(x1, y, x2, y, kind)
            self.line(x1, y - 3, x1, y + 3, kind)
            self.line(x2, y - 3, x2, y + 3, kind)

    def marker(self, x: float, y: float, number: int) -> None:
        """The mark of a point of curve `number`: another shape for each colour."""
        around = _MARKERS[number % len(_MARKERS)]
        kind = f"fill{number} point"
        if around is None:
            self.parts.append(f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="4"/>')
        else:
            self.path([(x + dx, y + dy) for dx, dy in around], kind, closed=True)

    def svg(self, kind: str = "") -> str:
        title = escape(self.title)
        return (
            f'<svg class="{kind}" viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" aria-label="{title}">\n'
            f"<title>{title}</title>\n" + "\n".join(self.parts) + "\n</svg>"
        )


_MARKERS: list[list[tuple[float, float]] | None] = [
    None,
    [(-4, -4), (4, -4), (4, 4), (-4, 4)],
    [(0, -5), (5, 4), (-5, 4)],
    [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
    [(0, 5), (5, -4), (-5, -4)],
    [(-5, 5), (-5, 0), (0, 0), (0, -5), (5, -5), (5, 5)],
    [(-5, 0), (-2.5, -4.5), (2.5, -4.5), (5, 0), (2.5, 4.5), (-2.5, 4.5)],
    [(-5, -2.5), (5, -2.5), (5, 2.5), (-5, 2.5)],
]


def ticks(largest: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to the first that is no less than `largest`."""
    if largest <= 0 or not math.isfinite(largest):
        return [0.0, 1.0]
    rough = largest / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    count = math.ceil(largest / step - 1e-9)
    return [round(step * index, 12) for index in range(count + 1)]


def width_of(text: str, size: int = TEXT) -> float:
    """About how wide `text` is at most: pages don't say which font they will be shown in."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return size * (0.61 * (len(text) - wide) + 1.05 * wide)


def cut(text: str, width: float, size: int = TEXT) -> str:
    if width_of(text, size) <= width:
        return text
    while text and width_of(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _n(value: float) -> str:
    return f"{round(value, 2):g}" if abs(value) < 1e5 else f"{value:.1f}"
