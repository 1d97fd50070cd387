"""What a slim cache attends with equals attention to the keys and values that it does without."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the caches need torch")

import torch

from fastgen.cache.slim.latent import InputCache, KeyCache, Projections, Slim, condition, rotated, slim_cache
from fastgen.layers.attention import beam_attention

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
    slim, stored = InputCache(projections), (inputs[:, None],)
    keys, values = slim.keys_and_values(stored)
    by_head = torch.randn(1, query.shape[1], shape[1], shape[7])  # as T5's relative positions
    for added in (None, bias, bias + by_head):
        expected = beam_attention(query, keys.contiguous(), values.contiguous(), added, 0.3)
        output = slim.attend(query, stored, added, 0.3)
        assert output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_the_projections() -> None:
    projections, _, inputs, _ = drawn(SHAPES[1])
    keys, values = InputCache(projections).keys_and_values((inputs[:, None],))
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
    forgetful = InputCache(Projections(projections.key, projections.value, projections.key_bias, None))
    stored = (inputs[:, None],)
    difference = forgetful.attend(query, stored, bias, 0.3) - InputCache(projections).attend(query, stored, bias, 0.3)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_half_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The error of attention is at most twice that of keys and values of this dtype."""
    projections, query, inputs, bias = drawn(shape, dtype)
    exact = InputCache(Projections(*(x if x is None else x.double() for x in vars(projections).values())))
    keys, values = exact.keys_and_values((inputs.double()[:, None],))
    expected = beam_attention(query.double(), keys, values, bias.double(), 0.3)
    slim, stored = InputCache(projections), (inputs[:, None],)
    keys, values = slim.keys_and_values(stored)
    plain = beam_attention(query, keys.contiguous(), values.contiguous(), bias, 0.3)
    ours = slim.attend(query, stored, bias, 0.3)
    assert ours.dtype == dtype
    for measure in (torch.Tensor.max, torch.Tensor.mean):
        its, mine = (float(measure((output.double() - expected).abs())) for output in (plain, ours))
        assert mine <= 2 * its, (mine, its)


# ---------------------------------------------------------------------------------------------- keys or values alone
# batch, beams, heads, head size, width of the input, positions
INVERTIBLE = [(1, 1, 1, 1, 1, 1), (2, 3, 4, 8, 32, 11), (2, 5, 4, 16, 32, 7), (1, 40, 2, 5, 9, 13), (3, 1, 4, 8, 32, 5)]


def orthogonal(heads: int, size: int, width: int) -> torch.Tensor:
    """A projection `[H, D, C]` without any condition."""
    largest = max(heads * size, width)
    return torch.linalg.qr(torch.randn(largest, largest))[0][: heads * size, :width].unflatten(0, (heads, size))


def one_alone(kind: str, shape: tuple[int, ...], threshold: float = 0.0) -> tuple[Slim, Projections, torch.Tensor]:
    _, _, heads, size, width, _ = shape
    torch.manual_seed(sum(shape))
    good, other = orthogonal(heads, size, width), torch.randn(heads, size, width) * width**-0.5
    biases = torch.randn(heads, size), torch.randn(heads, size)
    projections = Projections(*((good, other) if kind == "k" else (other, good)), *biases)
    return slim_cache(kind, projections, threshold), projections, torch.randn(shape[0], shape[5], width)


@pytest.mark.parametrize("threshold", [0.0, 1e-12], ids=["all", "sparse"])
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("shape", INVERTIBLE, ids=str)
def test_one_alone_as_plain_attention(shape: tuple[int, ...], kind: str, threshold: float) -> None:
    batch, beams, heads, size, _, positions = shape
    slim, projections, inputs = one_alone(kind, shape, threshold)
    keys, values = projections.keys_and_values(inputs)
    stored = ((keys if kind == "k" else values).transpose(1, 2).flatten(2)[:, None],)
    query = torch.randn(batch * beams, heads, 1, size)
    bias = torch.randn(batch, 1, beams, positions)
    for added in (None, bias, bias + torch.randn(1, heads, beams, positions)):
        expected = beam_attention(query, keys.contiguous(), values.contiguous(), added, 0.3)
        output = slim.attend(query, stored, added, 0.3)
        assert output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for mine, its in zip(slim.keys_and_values(stored), (keys, values), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_both_orders_of_equation_2_1() -> None:
    """Values are computed for all positions where that is less work than a sum of keys for each head and beam."""
    slim = one_alone("k", INVERTIBLE[1])[0]
    assert isinstance(slim, KeyCache)
    assert [slim._recomputes(beams, 100) for beams in (1, 7, 8, 40)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["k", "v"])
def test_what_is_narrower_than_the_input_holds_less(kind: str) -> None:
    projections = drawn((1, 1, 2, 2, 4, 4, 9, 1))[0]
    with pytest.raises(ValueError, match="8 numbers do not hold an input of 9"):
        slim_cache(kind, projections)


@pytest.mark.parametrize("threshold", [0.0, 1e-12], ids=["on-read", "back"])
@pytest.mark.parametrize("size", [8, 4], ids=["whole", "partly"])
def test_rotary_keys(size: int, threshold: float) -> None:
    """Rotated when they are read; or stored as the host rotates them, and what the softmax keeps rotated back."""
    shape = (2, 3, 4, 8, 32, 11)
    batch, beams, heads, _, _, positions = shape
    _, projections, inputs = one_alone("k", shape)
    slim = slim_cache("k", projections, threshold, rotates=True)
    angles = torch.randn(batch, 1, positions, size // 2).repeat(1, 1, 1, 2)
    rotation = angles.cos(), angles.sin()
    keys, values = projections.keys_and_values(inputs)
    turned = rotated(keys, *rotation)
    assert not torch.allclose(turned, keys)
    torch.testing.assert_close(turned[..., size:], keys[..., size:])
    query = torch.randn(batch * beams, heads, 1, 8)
    expected = beam_attention(query, turned.contiguous(), values.contiguous(), None, 0.3)
    latent = (turned if threshold else keys).transpose(1, 2).flatten(2)[:, None]
    torch.testing.assert_close(slim.attend(query, (latent, *rotation), None, 0.3), expected, rtol=1e-5, atol=1e-5)
    for mine, its in zip(slim.keys_and_values((latent, *rotation)), (turned, values), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_only_keys_may_be_rotated() -> None:
    with pytest.raises(ValueError, match="rotated"):
        slim_cache("x", one_alone("k", INVERTIBLE[1])[1], rotates=True)


@pytest.mark.parametrize("kind", ["x", "k", "v"])
def test_what_weighs_less_is_left_out(kind: str) -> None:
    """An approximation: the error is at most what was left out, of values that are not larger than the largest."""
    shape = (2, 3, 4, 8, 32, 50)
    _, projections, inputs = one_alone("v" if kind == "v" else "k", shape)
    keys, values = projections.keys_and_values(inputs)
    stored = (inputs if kind == "x" else (keys if kind == "k" else values).transpose(1, 2).flatten(2))[:, None]
    query, threshold = torch.randn(6, 4, 1, 8) * 4, 0.02
    output = slim_cache(kind, projections, threshold).attend(query, (stored,), None, 0.3)
    expected = slim_cache(kind, projections).attend(query, (stored,), None, 0.3)
    largest = max(values.abs().max(), inputs.abs().sum(-1).max() * projections.value.abs().max())
    error = (output - expected).abs().max()
    assert 1e-4 < error <= threshold * shape[5] * (largest + projections.value_bias.abs().max())


def test_condition() -> None:
    weight = torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0])).view(2, 2, 4)
    assert condition(weight) == pytest.approx(8)
