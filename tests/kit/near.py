"""Compares results whose numbers may be rounded otherwise."""

from __future__ import annotations

from typing import Any

import pytest


def near(value: Any, **tolerance: Any) -> Any:
    """A value to compare with one whose floats differ by no more than a tolerance, given as to `pytest.approx`."""
    if isinstance(value, dict):
        return {name: near(one, **tolerance) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(near(one, **tolerance) for one in value)
    return pytest.approx(value, **tolerance) if isinstance(value, float) else value
