"""What a slim cache attends with equals attention to the keys and values that it does without."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch

from fastgen.attention import beam_attention
from fastgen.cache.slim import Projections, Slim

# batch, beams, query heads, key heads, head size, value size, width of the input, positions
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 1),
    (2, 3, 4, 4, 8, 8, 32, 11),
    (3, 5, 4, 4, 16, 16, 24, 7),  # wider than the input, as T5-11B's are
    (2, 4, 6, 2, 8, 8, 16, 13),  # key heads of three query heads each
    (1, 2, 3, 1, 5, 9, 17, 300),
    (2, 1, 4, 4, 8, 8, 32, 5),
]


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, biases: bool = True) -> tuple[Projections, ...]:
    batch, beams, heads, key_heads, size, value_size, width, positions = shape
    torch.manual_seed(sum(shape))
    scale = width**-0.5
    projections = Projections(
        (torch.randn(key_heads, size, width) * scale).to(dtype),
        (torch.randn(key_heads, value_size, width) * scale).to(dtype),
        torch.randn(key_heads, size).to(dtype) if biases else None,
        torch.randn(key_heads, value_size).to(dtype) if biases else None,
    )
    query = torch.randn(batch * beams, heads, 1, size).to(dtype)
    inputs = torch.randn(batch, positions, width).to(dtype)
    hidden = torch.rand(batch, 1, beams, positions) < 0.3
    hidden[..., 0] = False
    bias = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return projections, query, inputs, bias


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no-biases"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_plain_attention(shape: tuple[int, ...], biases: bool) -> None:
    projections, query, inputs, bias = drawn(shape, biases=biases)
    slim = Slim(projections)
    stored = slim.stored(inputs)
    assert stored.shape == (shape[0], 1, shape[7], shape[6])
    keys, values = slim.keys_and_values(stored)
    by_head = torch.randn(1, query.shape[1], shape[1], shape[7])  # as T5's relative positions
    for added in (None, bias, bias + by_head):
        expected = beam_attention(query, keys.contiguous(), values.contiguous(), added, 0.3)
        output = slim.attend(query, stored, added, 0.3)
        assert output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_the_projections() -> None:
    projections, _, inputs, _ = drawn(SHAPES[1])
    keys, values = Slim(projections).keys_and_values(inputs[:, None])
    for weight, bias, result in (
        (projections.key, projections.key_bias, keys),
        (projections.value, projections.value_bias, values),
    ):
        assert bias is not None
        expected = torch.einsum("bkc,hdc->bhkd", inputs, weight) + bias[:, None]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_the_values_bias_matters() -> None:
    """Else the test above would not notice if it were forgotten."""
    projections, query, inputs, bias = drawn(SHAPES[1])
    forgetful = Slim(Projections(projections.key, projections.value, projections.key_bias, None))
    stored = inputs[:, None]
    difference = forgetful.attend(query, stored, bias, 0.3) - Slim(projections).attend(query, stored, bias, 0.3)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_half_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The error of attention is at most twice that of keys and values of this dtype."""
    projections, query, inputs, bias = drawn(shape, dtype)
    exact = Slim(Projections(*(x if x is None else x.double() for x in vars(projections).values())))
    keys, values = exact.keys_and_values(inputs.double()[:, None])
    expected = beam_attention(query.double(), keys, values, bias.double(), 0.3)
    slim = Slim(projections)
    keys, values = slim.keys_and_values(inputs[:, None])
    plain = beam_attention(query, keys.contiguous(), values.contiguous(), bias, 0.3)
    ours = slim.attend(query, inputs[:, None], bias, 0.3)
    assert ours.dtype == dtype
    for measure in (torch.Tensor.max, torch.Tensor.mean):
        its, mine = (float(measure((output.double() - expected).abs())) for output in (plain, ours))
        assert mine <= 2 * its, (mine, its)
