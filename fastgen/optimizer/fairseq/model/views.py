"""Views of modules for one call, with some attributes replaced; the modules themselves are not changed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastgen.layers.linear import LinearDispatcher
from fastgen.patching.replaced_code import is_replaced


class Proxy:
    """Stands for a model or a generator, with some attributes replaced.

    All other attributes and methods are those of the object itself: what a method writes to `self` stays on the object.
    A replaced attribute is found before a property of the object's class.
    """

    def __init__(self, inner: Any, attributes: dict[str, Any]) -> None:
        """Refers to `inner` weakly: what is kept with a recording must not keep a model alive."""
        vars(self).update(attributes, _inner=weakref.ref(inner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner(), name, value)


def standing_in(inner: Any, **attributes: Any) -> Any:
    """A proxy of a model or a generator with these attributes; a proxy of a proxy has the attributes of both."""
    if isinstance(inner, Proxy):
        own = dict(vars(inner))
        return Proxy(own.pop("_inner")(), own | attributes)
    return Proxy(inner, attributes)


def replaced(module: Any, **attributes: Any) -> Any:
    """A view, a shallow copy, of a module of the host in which these attributes are replaced.

    They are found before submodules of the same names, which the view shares with the module. What the view's methods
    write to `self` is lost, so no method may be the user's.
    """
    view = copy.copy(module)
    view.__dict__.update(attributes)
    return view


def with_products(module: Any, products: LinearDispatcher) -> Any:
    """A view of a module whose direct linear layers, except those with hooks, multiply by `products`."""
    linear = {name: child for name, child in module.named_children() if is_plain(child)}
    return replaced(
        module, **{name: replaced(child, forward=_forward(child, products)) for name, child in linear.items()}
    )


def with_layers(part: Any, layers: list[Any]) -> Any:
    """A view of the host's list of layers of `part`, with `layers` in it; iterating over it may draw random numbers."""
    return replaced(part.layers, _modules={str(place): layer for place, layer in enumerate(layers)})


def is_plain(layer: Any) -> bool:
    """Whether a layer is torch's own linear layer, unchanged and without hooks."""
    # Under weight normalisation the weight is computed anew before each call, and is no parameter.
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not is_replaced(nn.Linear, "forward")
        and type(layer._parameters.get("weight")) is nn.Parameter
        and type(layer._parameters.get("bias")) in (nn.Parameter, type(None))
        and not has_hooks(layer)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks: these must see the module itself, not a view."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _forward(layer: nn.Linear, products: LinearDispatcher) -> Callable[[Tensor], Tensor]:
    stock: Any = nn.Linear.forward
    return lambda rows: products(layer, rows, stock)  # of the layer itself: packed copies outlive views
