"""The notebooks run offline, cell by cell, and have no outputs stored."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS

import fastgen
from fastgen import config

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
_NEEDS = {"speech.ipynb": ("whisper",)}


def _cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def _run(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(_cells(path, "code")):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["speech.ipynb", "translation.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NEEDS.get(path.name, ()):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")

    def refused(*_: Any) -> None:
        raise AssertionError("a notebook asks the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.chdir(tmp_path)
    before = len(fastgen.status().calls)
    with fastgen.configured(history=100):
        _run(path)
        calls = fastgen.status().calls
    assert len(calls) > before and any(call.tier != "stock" for call in calls[before:])
    assert config.current() == config.from_environment(), "the notebook leaves other settings"


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    """Negative control."""
    notebook = tmp_path / "wrong.ipynb"
    cells = [dict(cell_type="code", source=["one = 1\n", "assert one == 2"])]
    notebook.write_text(json.dumps(dict(cells=cells)), "utf-8")
    with pytest.raises(AssertionError):
        _run(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_small_and_stores_no_outputs(path: Path) -> None:
    assert path.stat().st_size < 10_000
    for cell in _cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert "".join(_cells(path, "markdown")[0]["source"]).startswith("# ")


def test_pages_lead_to_the_notebooks() -> None:
    linked = re.findall(r"\]\((notebooks/[\w-]+\.ipynb)\)", (DOCS / "recipes.md").read_text("utf-8"))
    assert sorted(linked) == [path.relative_to(DOCS).as_posix() for path in NOTEBOOKS]
