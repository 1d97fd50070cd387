"""Finds linear layers that multiply the same input in turn, such as the query, key and value projections.

The first decode step shows which layers these are, whatever their names; from then on they share one product.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

# Layers that were once not all called in turn, so that a part of their joint product was not used.
unfusable: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class FusionGroup:
    """The last input in one decode, the layers that have multiplied it, and outputs computed ahead for others."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # the last input, held so that no new tensor has the same identity
        self._version = 0
        self._alone: list[nn.Module] = []  # layers that have multiplied the input each by itself
        self._together: Sequence[nn.Module] = ()
        self._waiting: dict[int, Tensor] = {}  # id of a layer -> its part of a joint product

    def take(self, layer: nn.Module, rows: Tensor) -> Tensor | None:
        """The product of `rows` and the layer, if it was computed together with a sibling's product; else None."""
        return self._waiting.pop(id(layer), None) if self._waiting and self._is_same(rows) else None

    def turn_to(self, rows: Tensor) -> list[nn.Module]:
        """Note that a layer will multiply `rows`; returns the layers that shared the previous input, if several."""
        if self._is_same(rows):
            return []
        if self._waiting:
            unfusable.update(self._together)
        found = self._alone if len(self._alone) > 1 and unfusable.isdisjoint(self._alone) else []
        # Tensors of inference mode have no version that would tell whether they were written to in between.
        self._rows = None if rows.is_inference() else rows
        self._version = 0 if self._rows is None else rows._version
        self._alone, self._waiting = [], {}
        return found

    def note(self, layer: nn.Module) -> None:
        """Note that the layer has multiplied the input by itself."""
        self._alone.append(layer)

    def split(self, layers: Sequence[nn.Module], output: Tensor) -> Tensor:
        """Return the first layer's part of `output`, the joint product of `layers`, and keep the other parts."""
        sizes = [len(layer.weight) for layer in layers]  # type: ignore[arg-type]
        first, *others = output.split(sizes, dim=-1)
        self._together = layers
        self._waiting = {id(layer): part for layer, part in zip(layers[1:], others, strict=True)}
        return first

    def _is_same(self, rows: Tensor) -> bool:
        return rows is self._rows and rows._version == self._version
