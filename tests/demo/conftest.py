"""No test opens a browser: `opened` has what would have been shown."""

from __future__ import annotations

import webbrowser

import pytest


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def show(address: str) -> bool:
        found.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", show)
    return found
