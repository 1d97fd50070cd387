"""What torch may round the factors of float32 products to: a setting of the user's, for each of torch's libraries."""

from __future__ import annotations

import functools
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


def may_be_rounded_on_cpu() -> bool:
    """Whether the user lets torch round the factors of float32 products on a CPU: to bfloat16, or where this processor
    can to TF32."""
    found = _by_library()
    if not found:
        return torch.get_float32_matmul_precision() == "medium"
    return found["mkldnn"] == "bf16" or (found["mkldnn"] == "tf32" and _is_tf32_possible())


@functools.cache
def _is_tf32_possible() -> bool:
    """Whether oneDNN multiplies in TF32 on this processor, which torch asks before it lets it."""
    is_supported = getattr(torch.cpu, "_is_amx_fp16_supported", None)
    return is_supported is not None and bool(is_supported())
