"""`fastgen.attention.stream_attention` against a softmax over each row's keys put together, one row at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastgen.attention import stream_attention

SHAPES = [(1, 1, 1, 1, 4, 4), (2, 3, 4, 7, 8, 8), (3, 1, 2, 5, 4, 6), (1, 5, 2, 33, 16, 16)]


def _inputs(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    batch, beams, heads, keys, size, value_size = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    bias = random(batch, heads, beams, 2, keys)
    hidden = torch.rand(bias.shape, generator=generator) < 0.4
    hidden[..., 0] = False
    return [
        random(batch * beams, heads, 2, size),
        random(batch, heads, keys, size),
        random(batch, heads, keys, value_size),
        random(batch * beams, heads, size),
        random(batch * beams, heads, value_size),
        bias.masked_fill(hidden, torch.finfo(torch.float32).min),
        random(batch, heads, beams),
    ]


def _expected(inputs: list[Tensor], scale: float) -> Tensor:
    query, key, value, own_key, own_value, bias, own_bias = inputs
    batch, heads = key.shape[:2]
    beams = query.shape[0] // batch
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    for b, m, h, stream in itertools.product(range(batch), range(beams), range(heads), range(2)):
        row = b * beams + m
        keys, values, biases = key[b, h], value[b, h], bias[b, h, m, stream]
        if stream:
            keys, values = torch.cat([keys, own_key[row, h, None]]), torch.cat([values, own_value[row, h, None]])
            biases = torch.cat([biases, own_bias[b, h, m, None]])
        output[row, h, stream] = (keys @ query[row, h, stream] * scale + biases).softmax(0) @ values
    return output.transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...]) -> None:
    inputs = _inputs(shape, seed=0)
    output = stream_attention(*[x.float() for x in inputs], 0.3)
    torch.testing.assert_close(output.double(), _expected(inputs, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_bias_and_none_of_its_own(shape: tuple[int, ...]) -> None:
    inputs = _inputs(shape, seed=1)
    inputs[5], inputs[6] = inputs[5][:, :1, :, :1], torch.zeros_like(inputs[6])
    expected = _expected([*inputs[:5], inputs[5].expand(-1, shape[2], -1, 2, -1), inputs[6]], 0.5)
    output = stream_attention(*[x.float() for x in inputs[:6]], None, 0.5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    inputs = _inputs(SHAPES[3], seed=2)
    inputs[5] = inputs[5].clamp(min=torch.finfo(dtype).min)
    halves = [x.to(dtype) for x in inputs]
    output = stream_attention(*halves, 0.25)
    assert output.dtype == dtype
    exact = _expected([x.double() for x in halves], 0.25)
    assert (output.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_keys_in_a_longer_buffer() -> None:
    """As the tree's are: slots beyond those in use lie between two heads' keys."""
    inputs = _inputs(SHAPES[1], seed=3)
    longer = [torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, : x.shape[2]] for x in inputs[1:3]]
    output = stream_attention(*[x.float() for x in (inputs[0], *longer, *inputs[3:])], 0.3)
    torch.testing.assert_close(output.double(), _expected(inputs, 0.3), rtol=1e-5, atol=1e-5)
