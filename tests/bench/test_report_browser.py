"""The report as a browser shows it: nothing empty, nothing cut off, nothing wider than the window."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import bench_kit as kit
import pytest

from fastgen.bench import report
from fastgen.bench.document import Document
from fastgen.bench.report import image

needs_browser = pytest.mark.skipif(image.browser() is None, reason="no Chromium on the path")

MEASURE = """<script>
const outside = [], empty = [];
for (const svg of document.querySelectorAll('svg')) {
  const size = svg.getBoundingClientRect(), box = svg.viewBox.baseVal;
  if (size.width < 10 || size.height < 10) empty.push(svg.getAttribute('aria-label'));
  for (const text of svg.querySelectorAll('text')) {
    const place = text.getBBox(), right = place.x + place.width, bottom = place.y + place.height;
    if (place.x < -1 || place.y < -3 || right > box.width + 1 || bottom > box.height + 3)
      outside.push(text.textContent);
  }
}
document.title = JSON.stringify({pictures: document.querySelectorAll('svg').length, outside, empty,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth});
</script>"""


def measured(document: Document, folder: Path, width: int) -> dict[str, Any]:
    page = folder / "page.html"
    page.write_text(report.render(document).replace("</body>", f"{MEASURE}</body>"), "utf-8")
    found = image.browser()
    assert found is not None
    text = image.headless(found, page, "--dump-dom", width=width)
    title = re.search(r"<title>(.*?)</title>", text)
    assert title is not None
    result: dict[str, Any] = json.loads(unescape(title[1]))
    return result


def long_names() -> Document:
    """Names without a space, in sides, tasks, lines and reasons."""
    document = kit.sample()
    for side in document["sides"].values():
        side["label"] += " " + "long-name" * 12
    document["tasks"] = document["tasks"][:3] + kit.grid()
    for task in document["tasks"]:
        task["line"] = task.get("line", "") + "y" * 120
    long = document["tasks"][0]
    document["sections"][0]["tasks"] = ["z" * 300, document["tasks"][2]["name"]]
    document["sections"][2]["tasks"] = document["sections"][3]["tasks"] = ["z" * 300]
    long["name"], long["what"] = "z" * 300, "w" * 300
    return document


@needs_browser
@pytest.mark.parametrize(("make", "width"), [(kit.sample, 1040), (long_names, 500)])
def test_pictures_have_a_size_and_text_stays_inside(make: Any, width: int, tmp_path: Path) -> None:
    found = measured(make(), tmp_path, width)
    assert found["pictures"] > 15
    assert found["empty"] == [] and found["outside"] == []
    assert found["overflow"] <= 0


@needs_browser
def test_the_picture_is_as_tall_as_the_page(tmp_path: Path) -> None:
    section = {"title": "One", "text": "", "tasks": ["a"], "show": ["ratios"]}
    document = kit.document([kit.task("a", 1)], [section])  # type: ignore[list-item]
    report.write(document, tmp_path / "a.html")
    assert report.png(tmp_path / "a.html", tmp_path / "a.png") is None
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width == image.WIDTH and 1000 < height < image.TALLEST
    assert len(data) > 20_000  # a blank page of this size takes a few thousand bytes


def test_without_a_browser_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "chromium" in str(report.png(tmp_path / "a.html", tmp_path / "a.png"))
    assert not (tmp_path / "a.png").exists()


def test_a_browser_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise subprocess.CalledProcessError(1, "chromium")

    (tmp_path / "a.html").write_text("<body></body>")
    monkeypatch.setattr(image, "browser", lambda: "/usr/bin/chromium")
    monkeypatch.setattr(subprocess, "run", fails)
    assert report.png(tmp_path / "a.html", tmp_path / "a.png") == "No picture: chromium failed (CalledProcessError)."
