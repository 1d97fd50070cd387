"""The pages build without a warning, load nothing from elsewhere, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pages
import pytest
from pages import DOCS, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # --quiet would not see warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_a_dead_link_is_noticed(site: Path, tmp_path: Path) -> None:
    """Negative control: a page with a link to nowhere."""
    for path in ("mkdocs.yml", "docs"):
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, tmp_path / path)
    with (tmp_path / "docs" / "tuning.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](lists.md#nowhere)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode != 0 and "#nowhere" in built.stderr


class _Loaded(HTMLParser):
    """What a page loads when it is shown, and its blocks of code."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.blocks = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.blocks += tag == "pre"
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.addresses.append(str(found["src"]))
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(str(found["href"]))


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = _Loaded()
        loaded.feed(page.read_text("utf-8"))
        assert loaded.addresses
        for address in loaded.addresses:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text("utf-8")), sheet


def test_every_page_is_built(site: Path) -> None:
    for path in DOCS.rglob("*.md"):
        built = site / path.relative_to(DOCS).with_suffix(".html")
        loaded = _Loaded()
        loaded.feed(built.read_text("utf-8"))
        assert loaded.blocks == len(pages.blocks_of(pages.name_of(path))), f"{path.name}: a fence became no block"
    assert not (site / "tools").exists() and not (site / "data").exists()


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", pages.text_of("README.md"))
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        assert not anchor or anchor in _anchors(ROOT / path), link


def test_readme_leads_to_every_page() -> None:
    for path in DOCS.rglob("*.md"):
        assert f"]({pages.name_of(path)})" in pages.text_of("README.md"), path.name


def test_readme_is_one_screen() -> None:
    assert len(pages.text_of("README.md").splitlines()) <= 120
