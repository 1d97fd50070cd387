"""Kept buffers: taken again by later calls, and never while anybody refers to their memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from racing import share_nothing

import fastgen
from fastgen.memory import buffers, limits
from fastgen.memory.buffers import Buffers

pytestmark = pytest.mark.skipif(not buffers._COUNTS, reason="this torch does not count references to memory")
CPU = torch.device("cpu")
SIZE = buffers._MIN_BYTES


@pytest.fixture(autouse=True)
def _none_kept() -> Iterator[None]:
    buffers.release()
    yield
    buffers.release()


def taken(owner: Buffers, size: int = SIZE) -> torch.Tensor:
    return owner.empty((size // 4,), torch.float32, CPU)


def test_memory_serves_again_once_nobody_refers_to_it() -> None:
    owner = Buffers(model := torch.nn.Identity())
    first = taken(owner)
    address = first.data_ptr()
    part = first.view(4, -1)[1:2].detach()
    del first
    assert taken(owner).data_ptr() != address, "a part of it is still in use"
    del part
    assert taken(Buffers(model)).data_ptr() == address
    assert taken(Buffers(torch.nn.Identity())).data_ptr() != address, "another model's"


@pytest.mark.parametrize("shape", [(3, 5, 7, 4096), (1, 65536)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compatible_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    owner = Buffers(model := torch.nn.Identity())
    large = taken(owner, 2**23)
    address = large.data_ptr()
    del large
    other = owner.empty(shape, dtype, CPU)
    assert other.shape == shape and other.dtype == dtype and other.is_contiguous() and other.data_ptr() == address
    del model


def test_two_in_use_share_nothing() -> None:
    owner = Buffers(model := torch.nn.Identity())
    for _ in range(3):
        several = [taken(owner).fill_(i) for i in range(4)]
        assert [set(tensor.tolist()) for tensor in several] == [{float(i)} for i in range(4)]
        del several
    assert buffers.nbytes() == 4 * SIZE
    del model


def test_threads_get_different_ones() -> None:
    owner = Buffers(model := torch.nn.Identity())
    different = share_nothing(lambda: taken(owner))
    assert different and buffers.nbytes() <= 16 * SIZE, "each thread takes its next one before it lets go of the last"
    del model


def test_a_larger_one_replaces_what_was_too_small() -> None:
    owner = Buffers(model := torch.nn.Identity())
    for size in (SIZE, 2 * SIZE, 4 * SIZE):
        taken(owner, size)
    assert buffers.nbytes() == 4 * SIZE
    del model


def test_they_go_with_their_model() -> None:
    model = torch.nn.Identity()
    taken(Buffers(model))
    assert fastgen.status().buffer_bytes == SIZE and "buffers kept for later calls: 128.0 KiB" in str(fastgen.status())
    del model
    gc.collect()
    assert buffers.nbytes() == 0 and "buffers kept" not in str(fastgen.status())


def test_release() -> None:
    owner = Buffers(model := torch.nn.Identity())
    in_use = taken(owner).fill_(7)
    fastgen.release()
    assert buffers.nbytes() == 0
    taken(owner).fill_(8)
    assert bool((in_use == 7).all())
    del model


def test_nothing_is_kept_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Buffers(model := torch.nn.Identity())
    monkeypatch.setattr(limits, "free", lambda: SIZE * limits._SHARE - 1)
    assert taken(owner).numel() == SIZE // 4 and buffers.nbytes() == 0
    del model


def test_what_inference_mode_leaves_can_be_written_to_outside() -> None:
    owner = Buffers(model := torch.nn.Identity())
    with torch.inference_mode():
        taken(owner)
    taken(owner).fill_(1)
    del model


def test_small_ones_are_not_kept() -> None:
    owner = Buffers(model := torch.nn.Identity())
    taken(owner, SIZE - 4)
    assert buffers.nbytes() == 0
    del model
