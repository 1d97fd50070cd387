"""Code of a test in place of the host's, for the test to look on: foreign code would be left to the host."""

from __future__ import annotations

import types
from typing import Any


def disguised(function: Any, owner: type) -> Any:
    """The same function, as if the module of the class `owner` had defined it."""
    names = {**function.__globals__, "__name__": owner.__module__}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)  # the signature of what it wraps, if it does
    return copy
