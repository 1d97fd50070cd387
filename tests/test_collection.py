"""The tests can be collected together, whatever hosts are installed; what they share lies in tests/kit."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

TESTS = Path(__file__).parent
KIT = {path.stem for path in (TESTS / "kit").glob("*.py")}


def test_what_tests_share_lies_in_the_kit() -> None:
    others = {path.name for path in TESTS.rglob("*.py") if TESTS / "kit" not in path.parents}
    assert {name for name in others if not name.startswith("test_")} == {"conftest.py"}
    assert "zoo" in KIT


def test_no_test_imports_another() -> None:
    """Modules of the same name are in several folders: any of them might be found."""
    imported = {
        (path.name, name)
        for path in TESTS.rglob("*.py")
        for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    assert ("test_slim.py", "joined_calls") in imported
    # Its list of classes is what a page is compared with.
    assert {(user, name) for user, name in imported if name.startswith("test_")} == {("test_facts.py", "test_sweep")}


def test_no_name_of_the_kit_is_that_of_an_installed_package() -> None:
    assert not KIT & importlib.metadata.packages_distributions().keys()
