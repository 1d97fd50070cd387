"""Frees all that is kept between calls. Each module that keeps something registers a function that frees it."""

from __future__ import annotations

from collections.abc import Callable

_keepers: list[Callable[[], None]] = []


def keeper(free: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that frees what its module keeps."""
    _keepers.append(free)
    return free


def release() -> None:
    """Free what fastgen keeps between calls: packed weights, buffers, memory of steps, recorded steps."""
    for free in _keepers:
        free()
