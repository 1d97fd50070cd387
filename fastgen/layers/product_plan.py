"""How one decode multiplies by a linear layer, or by several that share an input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.layers import packed_weights
from fastgen.layers.timing import Product


@dataclass
class ProductPlan:
    """A product, and what it is given besides the rows."""

    product: Product
    weights: Any  # a packed copy, a screening, or a list with each layer's weight, itself or in fewer bits
    bias: Tensor | None
    layers: tuple[Any, ...]  # the one that is called, and the siblings of a joint product

    @property
    def is_joint(self) -> bool:
        return len(self.layers) > 1

    @property
    def takes_lists(self) -> bool:
        """Whether the product takes the weights of several layers as they are, and no joint copy."""
        return isinstance(self.weights, list)

    def is_current(self) -> bool:
        """Whether it multiplies by the layers' weights as they are, once outdated copies have been dropped."""
        bias = bias_of(self.layers)
        if bias is not self.bias and (bias is None or self.bias is None or not torch.equal(bias, self.bias)):
            return False
        if not self.takes_lists:
            return any(copy is self.weights for copy in packed_weights.copies_of(self.layers[0]))
        return all(
            weight is layer.weight or any(copy is weight for copy in packed_weights.copies_of(layer))
            for layer, weight in zip(self.layers, self.weights, strict=True)
        )


def bias_of(layers: tuple[Any, ...]) -> Tensor | None:
    """The bias of the layers' joint product, `[out]`; None if no layer has one."""
    biases = [layer.bias for layer in layers]
    if len(layers) == 1 or all(bias is None for bias in biases):
        return biases[0]
    return torch.cat(
        [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    )
