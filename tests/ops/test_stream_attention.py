"""Attention of several streams of a beam, against the same sums over each stream's own list of keys."""

from __future__ import annotations

import pytest
import torch

from fastgen.layers.attention import stream_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "beams", "streams", "heads", "keys"),
    [(1, 1, 2, 1, 1), (2, 5, 2, 3, 17), (3, 1, 3, 2, 8), (2, 4, 1, 3, 9)],
)
def test_each_stream_has_its_keys(
    batch: int, beams: int, streams: int, heads: int, keys: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(keys)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    rows, size, wide = batch * beams, 6, 10
    query, own_key, own_value = (
        values(rows, count, heads, each).transpose(1, 2)  # of no contiguous memory, as projections leave them
        for count, each in ((streams, size), (streams - 1, size), (streams - 1, wide))
    )
    key, value = values(batch, heads, keys, size), values(batch, heads, keys, wide)
    bias, own_bias = values(batch, heads, beams, streams, keys), values(rows, heads, streams - 1)
    bias[..., 1:] = torch.where(bias[..., 1:] > 1, torch.finfo(dtype).min, bias[..., 1:])
    given = [tensor.clone() for tensor in (query, key, value, own_key, own_value, bias, own_bias)]
    output = stream_attention(query, key, value, own_key, own_value, bias, own_bias, 0.3)
    assert output.shape == (rows, streams, heads, wide) and output.is_contiguous() and output.dtype == dtype

    query, key, value, own_key, own_value, bias, own_bias = (
        tensor.double() for tensor in (query, key, value, own_key, own_value, bias, own_bias)
    )
    error = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for row in range(rows):
        sentence, beam = divmod(row, beams)
        for stream in range(streams):
            for head in range(heads):
                mine, their = key[sentence, head], value[sentence, head]
                added = bias[sentence, head, beam, stream]
                if stream:
                    mine = torch.cat([mine, own_key[row, head, stream - 1 : stream]])
                    their = torch.cat([their, own_value[row, head, stream - 1 : stream]])
                    added = torch.cat([added, own_bias[row, head, stream - 1 : stream]])
                expected = (mine @ query[row, head, stream] * 0.3 + added).softmax(0) @ their
                torch.testing.assert_close(output[row, stream, head].double(), expected, atol=error, rtol=error)
    now = (query, key, value, own_key, own_value, bias, own_bias)
    assert all(torch.equal(a.double(), b) for a, b in zip(given, now, strict=True)), "an input was changed"


def test_biases_that_are_shared_or_missing() -> None:
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(*shape, 4, generator=random) for shape in ((6, 3, 2), (2, 3, 9), (2, 3, 9)))
    own_key, own_value = torch.randn(2, 6, 3, 1, 4, generator=random)
    bias, none = torch.randn(2, 1, 3, 1, 9, generator=random), torch.zeros(6, 3, 1)
    whole = stream_attention(query, key, value, own_key, own_value, bias.expand(-1, 3, -1, 2, -1), none, 0.3)
    assert torch.equal(stream_attention(query, key, value, own_key, own_value, bias, None, 0.3), whole)
