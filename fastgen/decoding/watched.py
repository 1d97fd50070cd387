"""Whether anybody but the model itself sees, or has changed, what its modules do when they are called."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from torch import nn

_LEFT_BEHIND = "transformers.utils.output_capturing"  # hooks that stay once hidden states were asked for


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody sees the calls of a module, or has replaced or compiled it for the shapes it has."""
    if nn.modules.module._has_any_global_hook() or _is_torch_patched():
        return True
    return any(
        _foreign(module._forward_hooks.values())
        or _foreign(module._forward_pre_hooks.values())
        or "forward" in vars(module)
        or module._compiled_call_impl is not None
        for module in modules
    )


def _is_torch_patched() -> bool:
    """Whether somebody has replaced one of torch's functions of neural networks.

    They hand themselves, by name, to a mode that is active: a replacement that calls the original is called twice then.
    """
    return any(
        isinstance(value, types.FunctionType) and not value.__globals__.get("__name__", "").startswith("torch")
        for value in vars(nn.functional).values()
    )


def _foreign(hooks: Iterable[Any]) -> bool:
    return any(getattr(hook, "__module__", "") != _LEFT_BEHIND for hook in hooks)


def are_of(packages: set[str], modules: Iterable[nn.Module]) -> bool:
    """Whether all of these modules' classes are torch's or of these packages."""
    return {type(module).__module__.partition(".")[0] for module in modules} <= {"torch", *packages}
