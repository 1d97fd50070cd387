"""The pages build without a warning, load nothing from elsewhere, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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


# ---------------------------------------------------------------------------------------------- built pages
class _Elements(HTMLParser):
    """Every element of a page: its name and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, {name: value or "" for name, value in attrs}))

    def named(self, *names: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.all if tag in names]

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.all if "id" in attributes]


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, _Elements]:
    return {path: _Elements(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def _dead_links(built: dict[Path, _Elements]) -> list[str]:
    """Links and pictures that lead to no file, or to no element of the page."""
    dead = []
    for page, elements in built.items():
        links = [one["href"] for one in elements.named("a", "link") if "href" in one]
        links += [one["src"] for one in elements.named("img", "script") if one.get("src")]
        for link in links:
            address = urlsplit(link)
            if address.scheme or address.netloc or page.name == "404.html":  # that page is shown at any address
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            known = target.is_file() or (target / "index.html").is_file()
            is_picture = target.suffix == ".svg"  # whose fragment is for the theme: light or dark
            if not known or (address.fragment and not is_picture and address.fragment not in built[target].ids):
                dead.append(f"{page.name}: {link}")
    return dead


def test_every_link_and_picture_of_the_built_pages_leads_somewhere(built: dict[Path, _Elements]) -> None:
    assert sum(len(elements.named("a")) for elements in built.values()) > 1000
    assert _dead_links(built) == []


def test_dead_links_of_built_pages_are_noticed(built: dict[Path, _Elements]) -> None:
    """Negative control."""
    page = next(path for path in built if path.name == "tuning.html")
    whole = page.read_text("utf-8")
    for dead in ("none.html", "lists.html#none", "images/none.svg#only-dark"):
        element = f'<img src="{dead}" alt="x">' if dead.startswith("images") else f'<a href="{dead}">'
        assert _dead_links({**built, page: _Elements(whole + element)}) == [f"tuning.html: {dead}"]


def test_built_pages_can_be_read_by_all(built: dict[Path, _Elements]) -> None:
    """On a telephone, by a screen reader, in light and in dark."""
    for page, elements in built.items():
        assert elements.named("html")[0]["lang"] == "en"
        (viewport,) = [meta for meta in elements.named("meta") if meta.get("name") == "viewport"]
        assert "width=device-width" in viewport["content"]
        schemes = {one.get("data-md-color-scheme") for one in elements.named("input")} - {None}
        assert schemes == {"default", "slate"}, page.name
        twice = [name for name, count in Counter(elements.ids).items() if count > 1]
        assert not twice, f"{page.name}: {twice} are the ids of several elements"
        if page.name == "404.html":
            continue
        assert len(elements.named("h1")) == 1, page.name
        shown: dict[str, list[tuple[str, str]]] = {"light": [], "dark": []}
        for picture in elements.named("img"):
            assert len(picture["alt"]) > 20, f"{page.name}: {picture['src']} is described by {picture['alt']!r}"
            for theme, found in shown.items():
                if f"#only-{theme}" in picture["src"]:
                    found.append((picture["src"].replace(theme, ""), picture["alt"]))
        assert shown["light"] == shown["dark"], f"{page.name}: a picture for one theme alone"


def test_wide_tables_scroll_in_boxes_of_their_own(site: Path, built: dict[Path, _Elements]) -> None:
    """By the theme's rule for tables without a class, which our sheet leaves alone."""
    sheets = {path.name: path.read_text("utf-8") for path in site.rglob("*.css")}
    (theme,) = [text for name, text in sheets.items() if name.startswith("main.")]
    (rule, *_) = re.findall(r"\.md-typeset table:not\(\[class\]\)\{([^}]*)\}", theme)
    assert {"display:inline-block", "max-width:100%", "overflow:auto"} <= set(rule.split(";"))
    ours = re.findall(r"table:not\(\[class\]\) \{([^}]*)\}", sheets["extra.css"])
    assert ours and not any(re.search(r"overflow|display|(?<!-)width", each) for each in ours)
    tables = [(page.name, table) for page, elements in built.items() for table in elements.named("table")]
    assert len(tables) > 50
    assert [name for name, table in tables if "class" in table] == []


def test_the_search_knows_every_page_and_section(site: Path, built: dict[Path, _Elements]) -> None:
    index: dict[str, Any] = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    known = {one["location"] for one in index["docs"]}
    for page, elements in built.items():
        if page.name == "404.html":
            continue
        assert page.relative_to(site).as_posix() in known
        sections = [one["id"] for one in elements.named("h2", "h3") if "id" in one]
        assert {f"{page.relative_to(site).as_posix()}#{name}" for name in sections} <= known, page.name
    assert any("output_attentions" in one["text"] for one in index["docs"])


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_each_page_begins_with_whom_it_is_for(path: Path) -> None:
    assert re.match(r"# .+\n\nThis page is for \w", path.read_text("utf-8"))


# ---------------------------------------------------------------------------------------------- README
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
