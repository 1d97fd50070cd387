"""Relative positions as in T5: buckets of distances back to a key, exact when near and logarithmic when far."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bucket_table(buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance back from 0 to `max_distance`, int64 `[max_distance + 1]`; the last for longer ones.

    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer" (2020), for one
    direction: half of the buckets hold one distance each.

    Raises ValueError if the logarithmic half would be empty.
    """
    exact = buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"{buckets} buckets leave nothing to a logarithm up to a distance of {max_distance}.")
    distance = torch.arange(max_distance + 1, device=None)  # where the model is made
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)  # of the logarithmic half
    far = (exact + share * (buckets - exact)).clamp(max=buckets - 1).long()
    return torch.where(distance < exact, distance, far)


def stream_buckets(table: Tensor, back: Tensor, streams: int) -> Tensor:
    """The buckets of the main stream's keys, for each of the streams that attend to them, int64 `[S, ...]`.

    `back`: int64, how many positions before the main stream's token the key is. For all predicting streams the
    predicted token counts as one position later, as they were trained. Where `back` is negative the key is of a later
    token, which no stream sees, and the bucket is arbitrary.
    """
    # A predicting stream's own key, at the predicted position, is in bucket 0.
    later = torch.arange(streams, device=back.device).clamp(max=1).view(-1, *[1] * back.dim())
    return table[(back + later).clamp(0, len(table) - 1)]
