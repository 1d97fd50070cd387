"""The README and the pages of the docs, and their fenced blocks."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PATHS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
_INFO = re.compile(r"^(?P<language>\w+)(?: \{(?P<attributes>[^}]*)\})?$")
LANGUAGES = ("python", "bash", "text")  # "text" is output, or a drawing
NEEDS = ("fairseq", "whisper", "hub", "gpu", "ray", "server")


@dataclass(frozen=True)
class Block:
    page: str  # as "README.md" or "docs/options.md"
    line: int  # of its first line of code
    language: str
    needs: str | None  # of NEEDS
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks_of(page: str) -> list[Block]:
    text, found = text_of(page), []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("body")) + 1
        info = _INFO.match(fence["info"].strip())
        assert info is not None, f"{page}:{line}: a fence of {fence['info']!r}, not of python, bash or text"
        attributes = (info["attributes"] or "").split()
        needs = [name.removeprefix(".needs-") for name in attributes]
        assert len(needs) <= 1 and set(needs) <= set(NEEDS), f"{page}:{line}: {attributes}"
        code = textwrap.dedent(fence["body"])
        found.append(Block(page, line, info["language"], needs[0] if needs else None, code))
    return found


PAGES = [name_of(path) for path in PATHS]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
