"""Calls a function when a module has been imported, now or later, without importing the module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fastgen import locks

Callback = Callable[[ModuleType], None]

# Guards the two tables below; never held while foreign code (a host's import, a callback) runs.
_lock = locks.reentrant_lock()
_callbacks: dict[str, list[Callback]] = {}
_executing: set[str] = set()  # names whose module body runs under our loader
_looking = threading.local()  # per thread: names whose real spec is being looked up


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` at once if `name` is imported, and after every later import of it.

    If the import is still running (a circular import, another thread), the callback waits for the end of it.
    """
    with _lock:
        known = _callbacks.setdefault(name, [])
        if callback not in known:
            known.append(callback)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if name in _executing:
            return
        module = sys.modules.get(name)
        if module is None:
            return
        spec = getattr(module, "__spec__", None)
        if _watch_initialization(spec, name, callback):
            return
    callback(module)


def cancel(name: str, callback: Callback) -> None:
    """Forget `callback`; the last one to go takes the finder off `sys.meta_path`."""
    with _lock:
        known = _callbacks.get(name, [])
        if callback in known:
            known.remove(callback)
        if not known:
            _callbacks.pop(name, None)
        if not _callbacks and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


class _Finder:
    """Finds nothing itself: asks the other finders and wraps the loader of a watched module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = _looking.__dict__.setdefault("names", set())
        if fullname not in _callbacks or fullname in names:
            return None
        names.add(fullname)  # another hook's finder may ask all finders again, us included
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find else None
                if spec is not None:
                    break
            else:
                return None
        finally:
            names.discard(fullname)
        if hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """The module's own loader, followed by the callbacks."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # half-made copy of us: no recursion
            raise AttributeError(name)
        return getattr(self._inner, name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._inner  # the module and its spec keep no trace of us
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        with _lock:
            _executing.add(name)
        callbacks: list[Callback] = []
        try:
            self._inner.exec_module(module)
        finally:
            with _lock:
                _executing.discard(name)
                callbacks += _callbacks.get(name, ())
        for callback in callbacks:
            callback(sys.modules.get(name, module))


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose import began before us: notices importlib clearing `_initializing`."""

    _waiting: list[tuple[str, Callback]]

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, value)
        if key == "_initializing" and not value:
            with _lock:
                waiting = self.__dict__.pop("_waiting", ())
                self.__class__ = ModuleSpec  # type: ignore[assignment]
            for name, callback in waiting:
                module = sys.modules.get(name)  # gone when the import failed
                if module is not None and callback in _callbacks.get(name, ()):
                    callback(module)


def _watch_initialization(spec: ModuleSpec | None, name: str, callback: Callback) -> bool:
    """Whether the module of `spec` is still being imported and `callback` will be called after that."""
    if not getattr(spec, "_initializing", False) or type(spec) not in (ModuleSpec, _WatchedSpec):
        return False
    assert spec is not None
    entry = (name, callback)
    waiting = spec.__dict__.setdefault("_waiting", [])
    waiting.append(entry)
    spec.__class__ = _WatchedSpec
    if spec.__dict__["_initializing"]:
        return True
    waiting.remove(entry)  # the import ended in between, perhaps before it could notice us
    if not waiting:
        del spec.__dict__["_waiting"]
        spec.__class__ = ModuleSpec
    return False


_finder = _Finder()
