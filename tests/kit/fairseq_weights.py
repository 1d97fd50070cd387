"""The weights of fairseq's models, which have the same names and numbers in each of fairseq's versions.

0.12.2 gives an encoder's layers copies of their weights, for another way to compute them, and makes them when it loads
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Parameter


def _copies(model: Any) -> set[int]:
    return {
        id(parameter)
        for module in model.modules()
        if hasattr(module, "load_to_BT")
        for parameter in module.parameters(recurse=False)
    }


def weights_of(model: Any) -> Iterator[tuple[str, Parameter]]:
    """Names and parameters, but for the copies."""
    copies = _copies(model)
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in copies)


def as_loaded(model: Any) -> Any:
    """The model, with the copies that loading a checkpoint makes."""
    if _copies(model):
        model.load_state_dict(model.state_dict())
    return model
