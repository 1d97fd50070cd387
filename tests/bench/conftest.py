"""The helpers beside this file importable, and a report of all kinds of sections."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # bench_kit and page_kit, whatever pytest's import mode

import bench_kit
from page_kit import Element, parsed

from fastgen.bench import report
from fastgen.bench.document import Document


@pytest.fixture(scope="session")
def document() -> Document:
    return bench_kit.sample()


@pytest.fixture(scope="session")
def page(document: Document) -> Element:
    return parsed(report.render(document))
