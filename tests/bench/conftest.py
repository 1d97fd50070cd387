"""A report of all kinds of sections."""

from __future__ import annotations

import bench_kit
import pytest
from page_kit import Element, parsed

from fastgen.bench import report
from fastgen.bench.document import Document


@pytest.fixture(scope="session")
def document() -> Document:
    return bench_kit.sample()


@pytest.fixture(scope="session")
def page(document: Document) -> Element:
    return parsed(report.render(document))
