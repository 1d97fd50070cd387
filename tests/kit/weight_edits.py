"""Ways in which the weight of a linear layer of 48 inputs and 64 outputs becomes another."""

from __future__ import annotations

from typing import Any

import torch


def step(layer: Any) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer(torch.ones(1, 48)).sum().backward()
        optimizer.step()


def load(layer: Any) -> None:
    layer.load_state_dict({name: tensor + 1 for name, tensor in layer.state_dict().items()})


def data(layer: Any) -> None:
    first, second = layer.weight.shape
    layer.weight.data += 1e-3 * torch.randn(first, 1) @ torch.randn(1, second)  # as adapters merge themselves


def one_element(layer: Any) -> None:
    layer.weight.data[17, 5] += 1.0


def reordered(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(0))


def in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def replace(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(torch.randn(layer.weight.shape))


def swap_data(layer: Any) -> None:
    layer.weight.data = torch.randn(layer.weight.shape)


def double_and_back(layer: Any) -> None:
    layer.to(torch.float64)
    layer.weight.data.add_(1)
    layer.to(torch.float32)


IN_PLACE = [step, load, data, one_element, reordered, in_place]
EDITS = [*IN_PLACE, replace, swap_data, double_and_back]
