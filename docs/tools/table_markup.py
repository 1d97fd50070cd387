"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *([_unbroken(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _unbroken(cell: str) -> str:
    """Without ends of lines between figures and their units."""
    figures = re.fullmatch(r"(?:[\d.,x*()/ ]|\b(?:to|s|ms|MB|MiB)\b)+", cell)
    return cell.replace(" ", "\u00a0") if figures else cell
