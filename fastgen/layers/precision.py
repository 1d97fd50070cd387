"""What torch may round the factors of float32 products to: a setting of the user's, for each of torch's libraries."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def _by_library() -> dict[str, str]:
    """The settings by library, `none` being the default; empty before torch 2.9, which has one setting for all."""
    libraries = {"cuda": torch.backends.cuda, "mkldnn": torch.backends.mkldnn}
    products = {name: getattr(library, "matmul", None) for name, library in libraries.items()}
    found = {name: getattr(one, "fp32_precision", "") for name, one in products.items()}
    return found if all(found.values()) else {}


def of_products() -> Hashable:
    """A value that differs where float32 products may be rounded otherwise."""
    # The old setting may not even be asked for once the new ones were used.
    return (
        tuple(found.replace("none", "ieee") for found in _by_library().values()) or torch.get_float32_matmul_precision()
    )


def may_be_bfloat16_on_cpu() -> bool:
    """Whether the user lets torch compute float32 products on a CPU in bfloat16, which some processors do."""
    found = _by_library()
    return found["mkldnn"] == "bf16" if found else torch.get_float32_matmul_precision() == "medium"
