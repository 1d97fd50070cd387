"""Views of modules: for one call, with some attributes of their own, while the modules stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastgen.decoding.watched import is_replaced
from fastgen.products import Products


def replaced(module: Any, **attributes: Any) -> Any:
    """A view of a module in which these attributes are others.

    They lie beside the submodules, which the view shares with the module, and are found before them.
    """
    view = copy.copy(module)
    view.__dict__.update(attributes)
    return view


def with_products(module: Any, products: Products) -> Any:
    """A view of a module whose own linear layers multiply by `products`, but for those with hooks."""
    linear = {name: child for name, child in module.named_children() if is_plain(child)}
    return replaced(
        module, **{name: replaced(child, forward=_forward(child, products)) for name, child in linear.items()}
    )


def is_plain(layer: Any) -> bool:
    """Whether it does what torch's own linear layer does, and nobody watches."""
    # Weight normalisation computes the weight anew before each call, and it is no parameter then.
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not is_replaced(nn.Linear, "forward")
        and "weight" in layer._parameters
        and not has_hooks(layer)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module is watched: hooks are to see the module itself, not a view."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _forward(layer: nn.Linear, products: Products) -> Callable[[Tensor], Tensor]:
    stock: Any = nn.Linear.forward
    return lambda rows: products(layer, rows, stock)  # of the layer itself: copies outlive the views
