"""Views of modules: for one call, with some attributes of their own, while the modules stay as they are."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastgen.layers.linear import LinearDispatcher
from fastgen.patching.replaced_code import is_replaced


class Proxy:
    """Stands in for a model or a generator, with some attributes of its own.

    All others, methods among them, are those of the object itself: what they write to `self` stays there, and an
    attribute of its own is found before a property of the object's class.
    """

    def __init__(self, inner: Any, attributes: dict[str, Any]) -> None:
        """It does not keep `inner` alive: what is kept with a recording must not."""
        vars(self).update(attributes, _inner=weakref.ref(inner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner(), name, value)


def standing_in(inner: Any, **attributes: Any) -> Any:
    """A stand-in for a model or a generator, or for what another one stands in for."""
    if isinstance(inner, Proxy):
        own = dict(vars(inner))
        return Proxy(own.pop("_inner")(), own | attributes)
    return Proxy(inner, attributes)


def replaced(module: Any, **attributes: Any) -> Any:
    """A view of a module of the host's in which these attributes are others.

    They lie beside the submodules, which the view shares with the module, and are found before them. What its methods
    write to `self` is lost: no method may be the user's.
    """
    view = copy.copy(module)
    view.__dict__.update(attributes)
    return view


def with_products(module: Any, products: LinearDispatcher) -> Any:
    """A view of a module whose own linear layers multiply by `products`, but for those with hooks."""
    linear = {name: child for name, child in module.named_children() if is_plain(child)}
    return replaced(
        module, **{name: replaced(child, forward=_forward(child, products)) for name, child in linear.items()}
    )


def with_layers(part: Any, layers: list[Any]) -> Any:
    """The host's list of the layers of `part` with these in it: to iterate over it may draw random numbers."""
    return replaced(part.layers, _modules={str(place): layer for place, layer in enumerate(layers)})


def is_plain(layer: Any) -> bool:
    """Whether it does what torch's own linear layer does, and nobody watches."""
    # Weight normalisation computes the weight anew before each call, and it is no parameter then.
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not is_replaced(nn.Linear, "forward")
        and type(layer._parameters.get("weight")) is nn.Parameter
        and type(layer._parameters.get("bias")) in (nn.Parameter, type(None))
        and not has_hooks(layer)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module is watched: hooks are to see the module itself, not a view."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _forward(layer: nn.Linear, products: LinearDispatcher) -> Callable[[Tensor], Tensor]:
    stock: Any = nn.Linear.forward
    return lambda rows: products(layer, rows, stock)  # of the layer itself: copies outlive the views
