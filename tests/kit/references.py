"""The operators in plain torch, by name."""

from __future__ import annotations

from types import SimpleNamespace

from fastgen.ops.operator import OPERATORS

reference = SimpleNamespace(**{name: operator.reference for name, operator in OPERATORS.items()})
