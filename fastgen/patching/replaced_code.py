"""Tells whether code other than the model's own sees the calls of its modules, or has replaced their functions."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_LEFT_BEHIND = "transformers.utils.output_capturing"  # hooks that stay once hidden states were asked for
# The functions of torch that models call, as they were when this was imported.
_PREFIXES = ("torch.", "torch.nn.functional.", "torch.Tensor.")
_NAMESPACES = [vars(torch), vars(nn.functional), vars(Tensor)]
_CALLED = [{name: value for name, value in space.items() if callable(value)} for space in _NAMESPACES]
_MISSING = object()


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether foreign code sees the calls of a module, or a module or a function of torch was replaced or compiled."""
    return replaced_function() is not None or are_interrupted(modules)


def are_interrupted(modules: Iterable[nn.Module]) -> bool:
    """Whether foreign code may run when one of these modules is called: before it, after it or in place of it."""
    if nn.modules.module._has_any_global_hook():
        return True
    modules = list(modules)
    if any(is_replaced(kind, "forward") for kind in set(map(type, modules))):
        return True
    return any(
        _foreign(module._forward_hooks.values())
        or _foreign(module._forward_pre_hooks.values())
        or not _is_its_own(module, vars(module).get("forward"))
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in modules
    )


def _is_its_own(module: nn.Module, forward: Any) -> bool:
    """Whether a module's attribute `forward`, if there is one, is the method of the module's class: transformers 4.57
    leaves that behind once hidden states were asked for."""
    if forward is None:
        return True
    is_bound = getattr(forward, "__self__", None) is module
    return is_bound and forward.__func__ is getattr(type(module), "forward", None)


def replaced_function() -> str | None:
    """The name of a function of torch that somebody has replaced, now or before this was imported; None if none was.

    Such functions hand themselves, by name, to an active mode: a replacement that calls the original is called twice.
    """
    return next(iter(replaced_functions()), None)


def replaced_functions() -> dict[str, Any]:
    """What stands in place of functions of torch that somebody has replaced, by their names."""
    found = {} if _WAS_PATCHED is None else {_WAS_PATCHED: _CALLED[1][_WAS_PATCHED.removeprefix(_PREFIXES[1])]}
    for prefix, space, called in zip(_PREFIXES, _NAMESPACES, _CALLED, strict=True):
        if all(map(operator.is_, map(space.get, called), called.values())):
            continue
        for name, value in called.items():
            now = space.get(name)
            if now is not value and not _is_torchs(now):  # torch's compiler replaces some
                found[prefix + name] = now
    return found


def _is_torchs(value: Any) -> bool:
    """Whether a function's code, or another object's type, is torch's: a wrapper may bear another's names."""
    if isinstance(value, types.FunctionType):
        home = value.__globals__.get("__name__")
    else:
        home = getattr(value if isinstance(value, types.BuiltinFunctionType) else type(value), "__module__", None)
    return isinstance(value, type) or str(home).partition(".")[0] in ("torch", "typing", "None")


_WAS_PATCHED = next((_PREFIXES[1] + name for name, value in _CALLED[1].items() if not _is_torchs(value)), None)


def is_replaced(kind: type, name: str) -> bool:
    """Whether the function `name` of this class is not from the package of the class that defines it.

    The module of the code decides: a wrapper may bear the wrapped function's name. Wrappers of torch and ours are fine.
    """
    for owner in kind.__mro__:
        function = vars(owner).get(name, _MISSING)  # at once: another thread may put back what was there
        if function is not _MISSING:
            return not is_of(function, owner.__module__.partition(".")[0], "torch", "fastgen")
    return False


def is_of(function: Any, *packages: str) -> bool:
    """Whether a function's code is in one of these packages, with what it wraps: `torch.no_grad` wraps anything."""
    function = getattr(function, "__func__", function)
    home: str = getattr(function, "__globals__", {}).get("__name__", "")
    inner = getattr(function, "__wrapped__", None)
    return home.partition(".")[0] in packages and (inner is None or is_of(inner, *packages))


def _foreign(hooks: Iterable[Any]) -> bool:
    return any(getattr(hook, "__module__", "") != _LEFT_BEHIND for hook in hooks)


def are_of(packages: set[str], modules: Iterable[nn.Module]) -> bool:
    """Whether the classes of all these modules belong to torch or to these packages."""
    return {type(module).__module__.partition(".")[0] for module in modules} <= {"torch", *packages}
