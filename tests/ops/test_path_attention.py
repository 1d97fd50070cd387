"""path_attention against brute force in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES
from references import reference
from torch import Tensor

CASES = settings(max_examples=EXAMPLES // 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
LOWEST = torch.finfo(torch.float32).min

cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "batch": st.integers(1, 3),
        "beams": st.one_of(st.integers(1, 9), st.sampled_from([13, 32, 53])),
        "key_heads": st.integers(1, 3),
        "group": st.one_of(st.integers(1, 4), st.sampled_from([7, 13])),
        "shared": st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 300])),
        "depth": st.one_of(st.integers(1, 20), st.sampled_from([255, 256, 300])),
        "size": st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 72, 128])),
        "value_size": st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 72, 128])),
        "scale": st.sampled_from([None, 1.0, 0.0, -0.5]),
        "bias": st.sampled_from(["none", "padding", "heads", "beams", "columns", "wide"]),
        "in_a_buffer": st.booleans(),
        "threads": st.sampled_from([1, 2]),
    }
)
PLAIN = dict(seed=1, scale=None, bias="none", in_a_buffer=True, threads=2)


def inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int]:
    """Arguments; slots that no row sees hold NaN, and so does the memory around keys and values."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, beams, heads = case["batch"], case["beams"], case["key_heads"] * case["group"]
    shared, depth, slots = case["shared"], case["depth"], case["shared"] + 3 * case["depth"] + 5
    query = torch.randn(batch * beams, heads, 1, case["size"], generator=generator)
    paths = torch.randint(shared, slots, (batch * beams, depth), generator=generator, dtype=torch.int32)
    # Each path ends somewhere, and what follows is not looked at; a row sees one slot at least.
    ends = torch.randint(0 if shared else 1, depth + 1, (batch * beams, 1), generator=generator)
    behind = torch.where(torch.arange(depth) == ends, -1, torch.randint(-9, slots, (depth,), generator=generator))
    paths = torch.where(torch.arange(depth) < ends, paths, behind.int())
    seen = torch.zeros(batch, slots, dtype=torch.bool)
    seen[:, :shared] = True
    for row, path in enumerate(paths.tolist()):
        seen[row // beams, path[: int(ends[row])]] = True
    tensors = []
    for size in (case["size"], case["value_size"]):
        room = 3 if case["in_a_buffer"] else 0
        buffer = torch.full((batch, case["key_heads"], slots + room, size + room), math.nan)
        numbers = torch.randn(batch, case["key_heads"], slots, size, generator=generator)
        buffer[:, :, :slots, :size] = numbers.masked_fill(~seen[:, None, :, None], math.nan)
        tensors.append(buffer[:, :, :slots, :size])
    scale = case["size"] ** -0.5 if case["scale"] is None else case["scale"]
    bias = bias_of(case["bias"], (batch, heads, beams, shared + depth), generator)
    return query, *tensors, paths, bias, scale, shared


def bias_of(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor | None:
    batch, heads, beams, width = shape
    if kind == "none":
        return None
    if kind == "padding":
        hidden = torch.rand(batch, 1, 1, width, generator=generator) < 0.4
        hidden[..., 0] = False  # each row sees that slot, or that of its path
        return hidden * LOWEST
    sizes = {"heads": (1, heads, 1, width), "beams": (1, 1, beams, width), "columns": (batch, heads, beams, 1)}
    return torch.randn(sizes.get(kind, shape), generator=generator) * 2


def brute_force(
    query: Tensor, key: Tensor, value: Tensor, paths: Tensor, bias: Tensor | None, scale: float, shared: int
) -> Tensor:
    """One row after the other, in float64."""
    rows, heads, _, size = query.shape
    beams, key_heads = rows // len(key), key.shape[1]
    if bias is not None:
        bias = bias.double().expand(len(key), heads, beams, shared + paths.shape[1])
    output = torch.empty(rows, 1, heads, value.shape[3], dtype=torch.float64)
    for row, path in enumerate(paths.tolist()):
        sentence, beam = divmod(row, beams)
        length = next((place for place, slot in enumerate(path) if slot < 0), len(path))
        slots = [*range(shared), *path[:length]]
        folded = query[row].double().view(key_heads, -1, size)
        scores = folded @ key[sentence, :, slots].double().mT * scale  # [Hkv, G, slots]
        if bias is not None:
            scores = scores + bias[sentence, :, beam, : len(slots)].reshape(scores.shape)
        output[row, 0] = (scores.softmax(-1) @ value[sentence, :, slots].double()).flatten(0, 1)
    return output


@CASES
@given(case=cases)
@example(case=PLAIN | dict(batch=1, beams=1, key_heads=1, group=1, shared=0, depth=1, size=1, value_size=1))
@example(case=PLAIN | dict(batch=2, beams=53, key_heads=2, group=3, shared=300, depth=7, size=72, value_size=41))
def test_path_attention(native: Any, threads: Any, case: dict[str, Any]) -> None:
    threads(case["threads"])
    arguments = inputs(case)
    output = native.path_attention(*arguments)
    assert output.is_contiguous() and output.dtype == torch.float32
    largest = abs(arguments[5]) * arguments[0].abs().max() * 5 * math.sqrt(case["size"])
    tolerance = 4e-6 * max(1.0, float(largest))
    torch.testing.assert_close(output.double(), brute_force(*arguments), rtol=1e-5, atol=tolerance)


@settings(CASES, max_examples=50)
@given(case=cases)
def test_plain_torch(case: dict[str, Any]) -> None:
    query, key, value, *others = inputs(case)  # which reads all slots, and hides some: none may be NaN
    arguments = (query, key.nan_to_num(0.5), value.nan_to_num(0.5), *others)
    torch.testing.assert_close(
        reference.path_attention(*arguments).double(), brute_force(*arguments), rtol=1e-4, atol=1e-4
    )


def test_a_row_that_sees_nothing_is_nan(native: Any) -> None:
    query, key, paths = torch.ones(2, 1, 1, 4), torch.ones(1, 1, 3, 4), torch.tensor([[-1, 0], [2, -1]]).int()
    for operators in (native, reference):
        output = operators.path_attention(query, key, key, paths, None, 1.0, 0)
        assert output[0].isnan().all() and output[1].eq(1).all()
        nothing = operators.path_attention(query, key, key, paths[:, :0], None, 1.0, 0)
        assert nothing.shape == output.shape and nothing.isnan().all()


def test_bad_arguments(operators: Any) -> None:
    query, key, paths = torch.ones(4, 2, 1, 8), torch.ones(2, 2, 5, 8), torch.zeros(4, 3, dtype=torch.int32)

    def refuses(error: type[Exception], message: str, **changed: Any) -> None:
        arguments = dict(query=query, key=key, value=key, paths=paths, bias=None, scale=1.0, shared=1) | changed
        with pytest.raises(error, match=message):
            operators.path_attention(*arguments.values())

    refuses(ValueError, r"paths must be \[4, depth\]", paths=paths[:3])
    refuses(TypeError, "paths must be int32", paths=paths.long())
    refuses(ValueError, "shared must be 0 to 5, not 6", shared=6)
    refuses(ValueError, r"bias must be broadcastable to \[2, 2, 2, 4\]", bias=torch.zeros(1, 1, 1, 5))
    refuses(TypeError, "query must be float32", query=query.half())
    refuses(TypeError, "bias must be float32", bias=torch.zeros(1, 1, 1, 4).half())
    refuses(IndexError, "5", paths=paths + 5)
