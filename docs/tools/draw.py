"""Draws docs/images/*.svg: `python docs/tools/draw.py`. Each picture is drawn twice, for light and for dark pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "images"


@dataclass(frozen=True)
class Colours:
    text: str
    faint: str  # lines and secondary text
    shared: str  # held once
    beams: tuple[str, str, str]
    dead: str
    on_colour: str  # text on any of these
    fastgen: str  # its bars, beside those of others


THEMES = {
    "light": Colours(
        "#1f2933", "#5f6b76", "#b9dfd8", ("#9ecbff", "#ffd08a", "#e3b5f0"), "#e4e7eb", "#1f2933", "#0f9d8a"
    ),
    "dark": Colours(
        "#e6eaef", "#a3adba", "#1f6b60", ("#2a5f9e", "#8a5a12", "#74408a"), "#3a404b", "#f2f5f8", "#2bb5a0"
    ),
}

# The example: three beams, four steps. Each step's tokens, and the beam that each of them continues.
BEAMS = 3
TOKENS = (("the", "a", "one"), ("cat", "dog", "cat"), ("sat", "lay", "sat"), ("on", "down", "on"))
PARENTS = ((0, 1, 2), (0, 0, 1), (0, 0, 1), (0, 0, 1))


def ancestry(steps: int) -> list[list[bool]]:
    """After so many steps, which slots each beam may see: `[BEAMS][steps * BEAMS]`."""
    seen: list[list[bool]] = [[] for _ in range(BEAMS)]
    for step in range(steps):
        seen = [[*seen[parent], *(m == beam for m in range(BEAMS))] for beam, parent in enumerate(PARENTS[step])]
    return seen


@dataclass
class Picture:
    width: int
    height: int
    title: str
    description: str
    colours: Colours
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 13, fill: str = "", anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill or self.colours.text}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.5, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g} C{(x1 + x2) / 2:g} {y1:g} {(x1 + x2) / 2:g} {y2:g} {x2:g} {y2:g}" fill="none" '
            f'stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {self.width + 2} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title description" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
        )
        titles = (
            f'<title id="title">{escape(self.title)}</title>\n<desc id="description">{escape(self.description)}</desc>'
        )
        return "\n".join([head, titles, *self.parts, "</svg>", ""])


def memory(colours: Colours) -> Picture:
    """Keys and values of one sentence with three beams: copies, and a tree."""
    picture = Picture(
        720,
        330,
        "The cache of one sentence with three beams, in the host and in fastgen",
        "The host keeps a copy of the source's keys and values and of all generated ones for each of three beams, and "
        "copies them at every step. fastgen keeps the source's once, beside one row of generated slots that the beams "
        "share; slots that no beam descends from are dropped.",
        colours,
    )
    left, source, slot, gap = 94, 290, 48, 4

    picture.text(0, 18, "The host: every beam has a copy, and all of it is copied again at every step", bold=True)
    for beam in range(BEAMS):
        y = 32 + beam * 34
        picture.text(0, y + 18, f"beam {beam + 1}", fill=colours.faint)
        picture.box(left, y, source, 26, colours.shared)
        picture.text(left + 10, y + 18, "source or prompt", fill=colours.on_colour)
        path = [index for index, sees in enumerate(ancestry(len(TOKENS))[beam]) if sees]
        for step, index in enumerate(path):
            x = left + source + gap + step * (slot + gap)
            picture.box(x, y, slot, 26, colours.beams[beam])
            picture.text(
                x + slot / 2, y + 18, TOKENS[index // BEAMS][index % BEAMS], fill=colours.on_colour, anchor="middle"
            )

    top = 172
    picture.text(0, top, "fastgen: one tree for the sentence; choosing beams changes the mask alone", bold=True)
    y = top + 14
    picture.text(0, y + 18, "stored", fill=colours.faint)
    picture.box(left, y, source, 26, colours.shared)
    picture.text(left + 10, y + 18, "source or prompt, once", fill=colours.on_colour)
    seen = ancestry(len(TOKENS))
    alive = [index for index in range(len(seen[0])) if any(row[index] for row in seen)]
    cell = 38
    for place, index in enumerate(alive):
        x = left + source + gap + place * (cell + gap)
        own = [beam for beam in range(BEAMS) if seen[beam][index]]
        fill = colours.beams[own[0]] if len(own) == 1 else colours.shared
        picture.box(x, y, cell, 26, fill)
        picture.text(
            x + cell / 2,
            y + 18,
            TOKENS[index // BEAMS][index % BEAMS],
            12,
            fill=colours.on_colour,
            anchor="middle",
        )
    for beam in range(BEAMS):
        row = y + 40 + beam * 24
        picture.text(0, row + 13, f"beam {beam + 1} sees", fill=colours.faint)
        picture.box(left, row, source, 16, colours.beams[beam])
        for place, index in enumerate(alive):
            x = left + source + gap + place * (cell + gap)
            picture.box(x, row, cell, 16, colours.beams[beam] if seen[beam][index] else "none", colours.faint)
    picture.text(
        0,
        y + 136,
        f"{len(alive)} of {len(seen[0])} generated slots are left: the others were on no beam's path.",
        12,
        colours.faint,
    )
    return picture


def tree(colours: Colours) -> Picture:
    """The tree over four steps, and the ancestry after each."""
    picture = Picture(
        720,
        396,
        "A beam tree over four steps, with the ancestry after each",
        " ".join(
            f"Step {step + 1}: "
            + ", ".join(
                f"slot {step * BEAMS + beam} holds '{token}'"
                + (f" and continues slot {(step - 1) * BEAMS + PARENTS[step][beam]}" if step else "")
                for beam, token in enumerate(tokens)
            )
            + "."
            for step, tokens in enumerate(TOKENS)
        )
        + " After step 4 beam 1 sees slots 0, 3, 6 and 9, beam 2 sees 0, 3, 6 and 10, beam 3 sees 0, 3, 7 and 11.",
        colours,
    )
    last = ancestry(len(TOKENS))
    x0, dx, dy, wide, high = 150, 140, 52, 92, 32

    def place(step: int, beam: int) -> tuple[float, float]:
        return x0 + step * dx, 40 + beam * dy

    picture.box(0, 40 + dy, 106, high, colours.shared)
    picture.text(53, 40 + dy + 21, "source", fill=colours.on_colour, anchor="middle")
    for step in range(len(TOKENS)):
        picture.text(x0 + step * dx + wide / 2, 22, f"step {step + 1}", 12, colours.faint, "middle")
        for beam in range(BEAMS):
            x, y = place(step, beam)
            index = step * BEAMS + beam
            own = [each for each in range(BEAMS) if last[each][index]]
            if step:
                px, py = place(step - 1, PARENTS[step][beam])
                start = (px + wide, py + high / 2)
            else:
                start = (106.0, 40 + dy + high / 2)
            stroke = colours.text if own else colours.faint
            picture.line(*start, x, y + high / 2, stroke, 2 if own else 1.2, "" if own else "4 3")
            fill = colours.dead if not own else colours.beams[own[0]] if len(own) == 1 else colours.shared
            picture.box(x, y, wide, high, fill)
            picture.text(x + 10, y + 21, TOKENS[step][beam], fill=colours.on_colour if own else colours.faint)
            picture.text(x + wide - 8, y + 21, str(index), 11, colours.on_colour if own else colours.faint, "end")

    top = 226
    picture.text(0, top, "Ancestry: a row for each beam, a column for each slot", bold=True)
    x, cell = 0.0, 15
    for step in range(len(TOKENS)):
        seen = ancestry(step + 1)
        picture.text(x, top + 26, f"after step {step + 1}", 12, colours.faint)
        parents = ", ".join(str(parent + 1) for parent in PARENTS[step])
        for beam, row in enumerate(seen):
            for index, sees in enumerate(row):
                fill = colours.beams[beam] if sees else "none"
                picture.box(x + index * cell, top + 36 + beam * cell, cell - 2, cell - 2, fill, colours.faint)
        if step:
            picture.text(x, top + 36 + 3 * cell + 16, f"from beams {parents}", 12, colours.faint)
        x += max(len(seen[0]) * cell, 112) + 34
    picture.text(
        0,
        top + 138,
        "Each step takes the rows of the beams it continues, and appends a slot for each. Grey slots are on no path",
        12,
        colours.faint,
    )
    picture.text(0, top + 156, "any more: they are dropped when the memory for slots is full.", 12, colours.faint)
    return picture


def gain(colours: Colours) -> Picture:
    """How many times as fast as the stock host: what else one would install, and fastgen."""
    import gains
    import generated

    rows = gains.gains(generated._result)
    bars = [
        (
            one,
            [
                *((name, ratio, colours.beams[0]) for name, ratio in one.peers.items()),
                ("fastgen", one.fastgen, colours.fastgen),
            ],
        )
        for one in rows
    ]
    said = "; ".join(
        f"{one.who}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio, _ in of_row) for one, of_row in bars
    )
    left = 14 + 7 * max(len(one.who) for one in rows)  # 7 pixels a letter, in a wide font
    bar, space, top = 17, 9, 44
    height = top + sum(len(of_row) * (bar + 2) + space for _, of_row in bars) + 24
    picture = Picture(720, height, "How many times as fast as the stock host", f"{said}.", colours)
    unit = (720 - left - 160) / max(ratio for _, of_row in bars for _, ratio, _ in of_row)
    picture.text(0, 18, "How many times as fast as the stock host, in float32, on a CPU", bold=True)
    y = float(top)
    for one, of_row in bars:
        picture.text(left - 10, y + 13, one.who, 13, anchor="end")
        for name, ratio, fill in of_row:
            picture.box(left, y, ratio * unit, bar, fill)
            picture.text(left + ratio * unit + 6, y + 13, f"{name} {ratio:.2f}x", 12, colours.faint)
            y += bar + 2
        y += space
    picture.line(left + unit, top - 6, left + unit, y, colours.faint, 1, "3 3")
    picture.text(left + unit, y + 12, "stock: 1x", 12, colours.faint, "middle")
    return picture


PICTURES = {"memory": memory, "tree": tree, "gain": gain}


def drawn() -> Iterator[tuple[Path, str]]:
    for name, picture in PICTURES.items():
        for theme, colours in THEMES.items():
            yield IMAGES / f"{name}-{theme}.svg", picture(colours).svg()


def main() -> int:
    for path, svg in drawn():
        path.write_text(svg, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
