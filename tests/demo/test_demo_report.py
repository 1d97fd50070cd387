"""fastgen-demo --report: one page with what ran on both sides, which needs nothing beside it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_kit import Element, parsed, row, tables

from fastgen.bench.report.demo import render
from fastgen.cli import demo
from fastgen.demo import comparison
from fastgen.demo.comparison import Result, Side

STOCK = [[5, 6], [7], [8, 9]]


class _Done(comparison.Job):
    """Of three texts, as if they had been decoded."""

    def __init__(self, answers: list[str] | None = None) -> None:
        import torch

        sources = ["bus 7", "room <12>", "page 3"]
        super().__init__("tiny", torch.nn.Linear(2, 3), None, sources, answers, 5, 64, 20, None)

    class _Config:
        is_encoder_decoder = True


def _result(ours: list[list[int]], seconds: tuple[float, float] = (3.0, 1.5), answers: Any = None) -> Result:
    job = _Done(answers)
    job.model.device = job.model.weight.device
    sides = {
        name: Side(tokens, taken, 2**20, [" & ".join(map(str, row)) for row in tokens])
        for name, tokens, taken in zip(comparison.SIDES, (STOCK, ours), seconds, strict=True)
    }
    return Result(job, sides, Counter({("fast", None): 2, ("stock", "output_attentions"): 1}))


def _page(*results: Result, samples: int = 4) -> Element:
    return parsed(render(results, samples))


def _bar(page: Element, kind: str) -> float:
    (found,) = page.all("rect", kind)
    return found.number("width")


def test_the_page_shows_what_ran() -> None:
    page = _page(_result(STOCK))
    table = tables(page)["Stock beside fastgen"]
    assert row(table, "time *")["stock"] == "3.00 s" and row(table, "time *")["fastgen"] == "1.50 s"
    assert table[1][3] == "2.00x faster"
    assert row(table, "inputs per second")["fastgen"] == "2.0"
    assert row(table, "identical outputs")["fastgen"] == "3 of 3"
    assert _bar(page, "fill0") == pytest.approx(2 * _bar(page, "fill1"))
    assert "All 3 outputs are identical; fastgen was 2.00x faster." in page.all(kind="summary")[0].text
    assert "1 x stock: transformers alone (output_attentions)" in page.text
    for name in ("torch", "transformers", "fastgen"):
        assert re.search(rf"{name} \d+\.\d+", page.text), name
    assert "CPU thread" in page.text and "5 beams" in page.text
    assert not page.all(kind="bad")


def test_an_output_that_differs_is_shown_in_red() -> None:
    page = _page(_result([[5, 6], [7], [8, 4]]), samples=1)
    outputs = tables(page)["2 of 3 outputs are identical; 2 of them"]
    assert row(outputs, "bus 7")["stock's output"] == "the same"
    assert row(outputs, "page 3")["fastgen's output"] == "8 & 4"
    assert row(outputs, "page 3")["stock's output"] == "8 & 9"
    assert [each.text for each in page.all(kind="bad")] == ["transformers: 1 of 3 outputs differ.", "8 & 9"]


def test_known_answers_are_compared() -> None:
    page = _page(_result(STOCK, answers=["5 & 6", "other", "8 & 9"]))
    assert row(tables(page)["Stock beside fastgen"], "exact match")["stock"] == "66.7%"
    outputs = tables(page)["3 of 3 outputs are identical; 3 of them"]
    assert [each[2] for each in outputs[1:]] == ["right", "wrong", "right"]


def test_a_page_of_two_works_has_a_section_for_each() -> None:
    page = _page(_result(STOCK), _result(STOCK, (2.0, 4.0)))
    assert len(page.all("section")) == 2
    assert "2.00x slower" in page.all("section")[1].text


def test_the_page_needs_nothing_beside_it() -> None:
    text = render([_result(STOCK)], 4)
    assert not re.search(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?\w*:?//""", text)
    assert not parsed(text).all("script") and not parsed(text).all("link")
    assert "prefers-color-scheme: dark" in text
    (picture,) = parsed(text).all("svg")
    assert picture.attributes["role"] == "img" and "3 of 3 outputs" in picture.attributes["aria-label"]
    assert parsed(text).all("meta")[1].attributes["content"] == "width=device-width, initial-scale=1"
    page = parsed(text)
    scrolling = [table for box in page.all("div", "scroll") for table in box.all("table")]
    assert len(scrolling) == len(page.all("table")) == 2  # on a telephone tables are moved in boxes of their own


def test_what_users_give_is_escaped() -> None:
    assert "room &lt;12&gt;" in render([_result(STOCK)], 4)


# ---------------------------------------------------------------------------------------------- the command
ARGUMENTS = ("--limit", "3", "--beams", "2", "--quiet")


def test_the_command_writes_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setattr(demo, "_has_display", lambda: True)
    path = tmp_path / "report.html"
    assert demo.main([*ARGUMENTS, "--report", str(path)]) == 0
    assert f"The report is {path}." in capsys.readouterr().out
    assert opened == [path.as_uri()]
    page = parsed(path.read_text("utf-8"))
    assert row(tables(page)["Stock beside fastgen"], "identical outputs")["fastgen"] == "3 of 3"


def test_the_report_has_a_name_by_default() -> None:
    assert demo.parse(["--report"]).report == Path("fastgen-demo.html")
    assert demo.parse([]).report is None


@pytest.mark.parametrize("display", [None, "DISPLAY", "WAYLAND_DISPLAY"])
def test_a_browser_is_opened_only_where_there_is_a_display(
    display: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv(display, ":0")
    assert demo._has_display() == bool(display)


@pytest.mark.parametrize("where", ["", "no-such-folder/report.html"])
def test_a_report_that_cannot_be_written_is_refused_first(
    where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert demo.main([*ARGUMENTS, "--report", str(tmp_path / where)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fastgen-demo: --report ") and captured.err.count("\n") == 1
