"""fingerprint: the same number from every implementation and layout, another one after every edit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from references import reference
from torch import Tensor

from fastgen import ops

CASES = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64)

shapes = st.tuples(st.integers(1, 40), st.one_of(st.integers(1, 70), st.sampled_from([96, 257])))
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "shape": shapes,
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(["dense", "transposed", "rows", "columns", "offset", "reversed storage"]),
        "places": st.tuples(*(st.floats(0, 1, exclude_max=True) for _ in range(4))),
    }
)


def tensor_of(case: dict[str, Any]) -> Tensor:
    rows, size = case["shape"]
    generator = torch.Generator().manual_seed(case["seed"])
    whole = (torch.randn(2 * rows, 2 * size + 1, generator=generator) * 50).to(case["dtype"])
    layouts = {
        "dense": lambda: whole[:rows, :size].clone(),
        "transposed": lambda: whole[:rows, :size].t().contiguous().t(),
        "rows": lambda: whole[::2, :size],
        "columns": lambda: whole[:rows, 1::2],
        "offset": lambda: whole[rows:, size + 1 :],
        "reversed storage": lambda: whole.t()[size + 1 :, rows:].t(),
    }
    return layouts[case["layout"]]()


def place(share: float, size: int) -> int:
    return int(share * size)


@CASES
@given(case=cases)
@example(case=dict(seed=0, shape=(3, 7), dtype=torch.float16, layout="offset", places=(0.0, 0.0, 0.0, 0.0)))
def test_implementations_and_layouts_agree(native: Any, threads: Any, case: dict[str, Any]) -> None:
    tensor = tensor_of(case)
    expected = int(reference.fingerprint(tensor.contiguous()))
    for count in (1, 2):
        threads(count)
        assert int(native.fingerprint(tensor)) == expected
    assert int(reference.fingerprint(tensor)) == expected
    assert int(reference.fingerprint(tensor.clone())) == expected


def test_many_rows_and_threads(native: Any, threads: Any) -> None:
    """More than one thread's share, and more than one slab of the reference."""
    tensor = torch.randn(3000, 101, generator=torch.Generator().manual_seed(0))
    expected = int(reference.fingerprint(tensor))
    for count in (1, 2, 3):
        threads(count)
        for one in (tensor, tensor.t().contiguous().t()):
            assert int(native.fingerprint(one)) == expected


def test_the_definition(operators: Any) -> None:
    """In Python's own integers."""

    def mixed_index(index: int) -> int:
        z = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    tensor = torch.tensor([[1.0, -2.5, 0.0], [-0.0, float("inf"), 3e-40]])
    total = 0
    for i, row in enumerate(tensor.view(torch.int32).tolist()):
        total_row = sum(mixed_index(j) * word for j, word in enumerate(row)) % 2**64
        total_row = (total_row ^ total_row >> 32) * 0xD6E8FEB86659FD93 % 2**64
        total += (total_row ^ total_row >> 32) * mixed_index(2**32 + i)
    assert int(operators.fingerprint(tensor)) % 2**64 == total % 2**64


@CASES
@given(case=cases)
def test_an_edit_of_one_element(operators: Any, case: dict[str, Any]) -> None:
    """Of any of its bits."""
    tensor = tensor_of(case).clone()
    before = int(operators.fingerprint(tensor))
    i, j = place(case["places"][0], tensor.shape[0]), place(case["places"][1], tensor.shape[1])
    width = tensor.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    bits = tensor.contiguous().view(integers)
    for bit in range(8 * width):
        edited = bits.clone()
        edited[i, j] ^= -(2**bit) if bit == 8 * width - 1 else 2**bit
        assert int(operators.fingerprint(edited.view(tensor.dtype))) != before


def exchanged(tensor: Tensor, dim: int, one: int, other: int) -> Tensor:
    order = torch.arange(tensor.shape[dim])
    order[one], order[other] = order[other].clone(), order[one].clone()
    return tensor.index_select(dim, order)


@CASES
@given(case=cases)
def test_exchanges_and_signs(operators: Any, case: dict[str, Any]) -> None:
    tensor = tensor_of(case)
    before = int(operators.fingerprint(tensor))
    rows, size = tensor.shape
    i, k = (place(share, rows) for share in case["places"][:2])
    j, m = (place(share, size) for share in case["places"][2:])
    swapped = tensor.clone()
    swapped[i, j], swapped[k, m] = tensor[k, m], tensor[i, j]
    others = {
        "elements": swapped,
        "rows": exchanged(tensor, 0, i, k),
        "columns": exchanged(tensor, 1, j, m),
        "all rows": tensor.flip(0),
        "all columns": tensor.flip(1),
        "rolled rows": tensor.roll(1, 0),
        "rolled pairs": tensor.roll(2, 1),
        "halves": tensor.roll(size // 2, 1),
        "signs": -tensor,
    }
    for name, other in others.items():
        is_same = torch.equal(other.view_as(tensor), tensor)
        if name == "signs" and is_same:  # zeros have signs, too
            continue
        assert (int(operators.fingerprint(other)) == before) == is_same, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_exchange_in_a_matrix(operators: Any, dtype: torch.dtype) -> None:
    """All pairs of elements, of rows, of columns, of pairs of columns; and all pairs of signs."""
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    flat, found = tensor.flatten(), dict[int, set[tuple[float, ...]]]()  # by fingerprint, those that have it

    def add(other: Tensor) -> None:
        found.setdefault(int(operators.fingerprint(other.reshape(6, 10))), set()).add(tuple(other.flatten().tolist()))

    add(tensor)

    for one, other in itertools.combinations(range(60), 2):
        add(exchanged(flat, 0, one, other))
        signs = torch.ones(60, dtype=dtype)
        signs[[one, other]] = -1
        add(flat * signs)
    for dim, size in enumerate(tensor.shape):
        for one, other in itertools.combinations(range(size), 2):
            add(exchanged(tensor, dim, one, other))
    for one, other in itertools.combinations(range(5), 2):
        add(exchanged(tensor.unflatten(1, (5, 2)), 1, one, other))
    assert len(found) > 3500 and {len(each) for each in found.values()} == {1}


def test_sparse_bits(operators: Any) -> None:
    """Weights of few distinct bits: no two of many matrices of -1, 0 and 1 are alike, where the last bits are all 0."""
    generator = torch.Generator().manual_seed(2)
    matrices = {tuple(torch.randint(-1, 2, (8,), generator=generator).tolist()) for _ in range(3000)}
    found = {int(operators.fingerprint(torch.tensor(each, dtype=torch.float32).view(2, 4))) for each in matrices}
    assert len(found) == len(matrices) > 2000


def test_nothing_and_errors(operators: Any) -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        assert int(operators.fingerprint(torch.empty(shape))) == 0
    for shape in ((), (3,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"tensor must be \[rows, size\]"):
            operators.fingerprint(torch.empty(shape))


def test_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    found = ops.fingerprint(weight)
    assert found.dtype == torch.int64 and found.shape == () and not found.requires_grad
    with torch.inference_mode():
        assert int(ops.fingerprint(weight.clone())) == int(found)
