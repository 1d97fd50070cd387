"""The tests can be collected together, whatever hosts are installed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def test_what_tests_import_from_one_another_is_there_once() -> None:
    """The folders of the hosts' tests are all on the path: of two modules of one name, either might be found."""
    modules = Counter(path.stem for path in TESTS.rglob("*.py"))
    imported = {
        (path.name, name)
        for path in TESTS.rglob("*.py")
        for name in re.findall(r"^(?:from|import) (\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    assert ("test_slim.py", "joined_calls") in imported
    assert {(user, name) for user, name in imported if modules[name] > 1} == set()
