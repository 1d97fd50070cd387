"""What torch rounds the factors of float32 products to: a setting of the user's, for each of torch's libraries."""

from __future__ import annotations

from collections.abc import Hashable

import torch

_EXACT = ("none", "ieee")


def _by_library() -> dict[str, str]:
    """The settings by library; empty before torch 2.9, which has one setting for all."""
    libraries = {"cuda": torch.backends.cuda, "mkldnn": torch.backends.mkldnn}
    found = {name: getattr(getattr(library, "matmul", None), "fp32_precision", "") for name, library in libraries.items()}
    return found if all(found.values()) else {}


def of_products() -> Hashable:
    """A value that differs where float32 products may be rounded otherwise."""
    # The old setting may not even be asked for once the new ones were used.
    return tuple(_by_library().values()) or torch.get_float32_matmul_precision()


def is_float32_on_cpu() -> bool:
    """Whether torch's products on a CPU are those of float32 numbers as they are."""
    found = _by_library()
    return found["mkldnn"] in _EXACT if found else torch.get_float32_matmul_precision() != "medium"
