"""Token ids of several sources as one tensor, with the mask that tells padding from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def padded_together(sources: Sequence[Any], pad: int, on_left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and mask of these sources, int64 `[B, N]` each, on the CPU; `pad` fills the shorter ones.

    `on_left`: for decoder-only models, which go on at the last position.
    """
    import torch

    longest = max(map(len, sources))
    ids = torch.full((len(sources), longest), pad, device="cpu")
    mask = torch.zeros_like(ids)
    for row, source in enumerate(sources):
        place = slice(longest - len(source), None) if on_left else slice(len(source))
        ids[row, place] = torch.as_tensor(source, device="cpu")
        mask[row, place] = 1
    return ids, mask
