"""Which phase each call of a built-in function belongs to: what samples would say, without time."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import fastgen
from fastgen import phases
from fastgen.bench import phase_rules

_ROOT = Path(fastgen.__file__).parent


@contextlib.contextmanager
def running(side: str) -> Iterator[None]:
    fastgen.configure(replay="off", tier="auto" if side == "stock" else side)
    with fastgen.disabled() if side == "stock" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def asked_at_every_call(table: phase_rules.Table) -> Iterator[dict[str, collections.Counter[str]]]:
    """By built-in function, the phases in which it is called."""
    phases: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def ask(frame: Any, event: str, called: Any) -> None:
        if event == "c_call":
            phases[getattr(called, "__name__", "")][table.phase(frame, end)] += 1

    end = sys._getframe(2)
    sys.setprofile(ask)
    try:
        yield phases
    finally:
        sys.setprofile(None)


def unreached(codes: Iterable[CodeType], *folders: str) -> set[str]:
    """Marks in these folders of the package that none of the codes bear: "file function", or "file" of a whole file."""
    codes = set(codes)
    files = {code.co_filename for code in codes}
    functions = {code for code in phases.marks() if code not in codes}
    marked = {path for path in _ROOT.rglob("*.py") if "\n__phase__ = " in path.read_text("utf-8")}
    found = {f"{Path(code.co_filename).relative_to(_ROOT)} {code.co_name}" for code in functions}
    found |= {str(path.relative_to(_ROOT)) for path in marked if str(path) not in files}
    return {name for name in found if name.startswith(folders)}
