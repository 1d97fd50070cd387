"""Evicting sentences: the last that stay take the places of those that leave, so that little is copied."""

from __future__ import annotations

import torch
from torch import Tensor

Moves = list[tuple[int, int]]  # places of sentences that leave, and who comes there


def staying(leaving: Tensor) -> Tensor:
    """Those of the sentences that stay, int64 `[B']`; `leaving`: which leave, bool `[B]`.

    Each whose place is below B' keeps that place; the others, in order, take the places of those that leave.
    """
    stay = torch.nonzero(~leaving)[:, 0]
    places = torch.nonzero(leaving[: len(stay)])[:, 0]
    sentences = torch.arange(len(stay), device=leaving.device)
    sentences[places] = stay[len(stay) - len(places) :]
    return sentences


def moves_to(sentences: Tensor) -> Moves | None:
    """What brings these sentences, int64 `[B']`, to the first places; None where one would be overwritten before it is
    read, which `staying` avoids, or where the CPU would have to wait for their device."""
    if sentences.device.type != "cpu":
        return None
    moves = [(place, source) for place, source in enumerate(sentences.tolist()) if place != source]
    return moves if all(source >= len(sentences) for _, source in moves) else None


def in_place(tensor: Tensor, count: int, moves: Moves, used: int | None = None) -> Tensor:
    """The first `count` sentences after the moves, a view of `tensor`, which is changed; `used`: beyond, dimension 2 is
    left as it is."""
    written = tensor if used is None else tensor[:, :, :used]
    for place, source in moves:
        written[place].copy_(written[source])  # faster than by an index: one block after the other
    return tensor[:count]
