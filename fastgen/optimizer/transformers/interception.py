"""Redirects calls of the host to us: wraps attributes of the host's classes while any thread decodes.

Wrappers act only for a thread's own session, so other threads, configs and the user's modules are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastgen.patching.redirection import Wrapper as Wrapper
from fastgen.patching.redirection import redirected

_local = threading.local()


class Intercepted(BaseException):  # no `except Exception` of the user is to catch it
    """Raised to carry a request out of the host's `generate`, which has prepared it."""

    def __init__(self, request: Any, stock: Callable[..., Any]) -> None:
        self.request, self.stock = request, stock


@contextlib.contextmanager
def intercepting() -> Iterator[None]:
    """Inside the block, requests of this thread are not run, but raised as `Intercepted`."""
    _local.intercepts = True
    try:
        yield
    finally:
        _local.intercepts = False


def raise_intercepted(request: Any, stock: Callable[..., Any]) -> None:
    """Raise Intercepted inside `intercepting`."""
    if getattr(_local, "intercepts", False):
        raise Intercepted(request, stock)


def current() -> Any:
    """The innermost `Session` of this thread; None if the thread decodes nothing."""
    sessions = _sessions()
    return sessions[-1] if sessions else None


@contextlib.contextmanager
def entered(session: Any) -> Iterator[None]:
    """Inside the block, `session` is the thread's innermost session."""
    sessions = _sessions()
    sessions.append(session)
    try:
        yield
    finally:
        sessions.pop()


def _sessions() -> list[Any]:
    if not hasattr(_local, "sessions"):
        _local.sessions = []
    sessions: list[Any] = _local.sessions
    return sessions


class _Route:
    """A model whose calls in this thread are answered by another function."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any]) -> None:
        self.model, self.call, self.is_inside = model, call, False


@contextlib.contextmanager
def calling(model: torch.nn.Module, call: Callable[..., Any], by_forward: bool = False) -> Iterator[None]:
    """Inside the block, `call(stock, *args, **kwargs)` answers when this thread calls `model`.

    `stock` is what calling the model would have run; calls inside another call run it. `by_forward`: calls of the
    model's `forward` are answered, too.
    """
    names = ("__call__", "forward") if by_forward else ("__call__",)
    routes = _routes()
    routes.append(_Route(model, call))
    try:
        with redirected({(type(model), name): _wrap_call for name in names}):
            yield
    finally:
        routes.pop()


def _routes() -> list[_Route]:
    if not hasattr(_local, "routes"):
        _local.routes = []
    routes: list[_Route] = _local.routes
    return routes


def _wrap_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        route = next((route for route in reversed(_routes()) if route.model is self), None)
        if route is None or route.is_inside:
            return stock(self, *args, **kwargs)
        route.is_inside = True
        try:
            return route.call(functools.partial(stock, self), *args, **kwargs)
        finally:
            route.is_inside = False

    return __call__
