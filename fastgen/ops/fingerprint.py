"""Computes a number that tells whether a tensor was edited."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops.operator import define

_OF_ROWS = 2**32  # where the multipliers of rows begin
_SLAB = {"cpu": 2**16}  # words read at a time, which stay in a near cache; on other devices:
_LARGE_SLAB = 2**22


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on each element of a tensor, bit for bit, and on its place: to tell whether it was edited.

    Multilinear hashing (Carter and Wegman 1979, https://doi.org/10.1016/0022-0000(79)90044-8; modulo a power of two:
    Lemire and Kaser 2014, https://doi.org/10.1093/comjnl/bxt070) of the 32-bit words of each row, and then of the rows.
    Natively, on the CPU, the tensor is read once, from where it is, about as fast as it comes from memory.

    An edit within one word, so within one element of 32 bits or fewer, changes it for certain. Over the choice of the
    multipliers, any other edit of a row leaves it as it is with a probability of at most 2^-(63 - t), where the lowest
    bit that changes in any of the words is number t: 2^-32 where signs flip and nothing else, 2^-63 of most edits of
    float32 numbers; and so does one of several rows, with 2^-57 or so. The multipliers are always the same: this is no
    protection from somebody who looks for edits that go unseen.

    Args:
        tensor: `[rows, size]`, of any dtype and strides.

    Returns: int64 `[]`; 0 of an empty tensor. The same whatever the strides, the device and the number of threads. No
        gradient passes through it.

    Raises:
        ValueError: for other shapes.
    """
    found: Tensor = _fingerprint(tensor.detach())
    return found


def check_fingerprint(tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"tensor must be [rows, size], not of shape {list(tensor.shape)}.")


def reference_fingerprint(tensor: Tensor) -> Tensor:
    check_fingerprint(tensor)
    total = tensor.new_zeros((), dtype=torch.int64)
    if not tensor.numel():
        return total
    count = -(-tensor.shape[1] * tensor.element_size() // 4)
    by = _multipliers(0, count, tensor.device)
    step = max(1, _SLAB.get(tensor.device.type, _LARGE_SLAB) // count)
    products = torch.empty(min(step, len(tensor)), count, dtype=torch.int64, device=tensor.device)
    sums = torch.empty(len(tensor), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(tensor), step):
        words = _words(tensor[start : start + step])
        torch.sum(torch.mul(words, by, out=products[: len(words)]), 1, out=sums[start : start + step])
    return (_mixed(sums) * _multipliers(_OF_ROWS, len(tensor), tensor.device)).sum()


def _words(rows: Tensor) -> Tensor:
    """The bytes of `rows`, `[count, size]`, as int32 `[count, words]`; zeros fill up the last word of each row."""
    rows = rows.detach()
    if rows.stride() != (rows.shape[1], 1):
        rows = rows.clone(memory_format=torch.contiguous_format)
    rows = rows.view(torch.uint8)
    if (more := -rows.shape[1] % 4) or rows.storage_offset() % 4:
        rows = F.pad(rows, (0, more)).clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


def _multipliers(first: int, count: int, device: torch.device) -> Tensor:
    """The multipliers of `count` indices, int64 `[count]`: SplitMix64 (Steele, Lea and Flood 2014), made odd."""
    z = torch.arange(first + 1, first + count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _mixed(sums: Tensor) -> Tensor:
    """Mix the bits of each sum, one to one, so that rows' sums with equal low bits no longer have them in common."""
    sums = (sums ^ _shifted(sums, 32)) * _signed(0xD6E8FEB86659FD93)
    return sums ^ _shifted(sums, 32)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers right as if they had no sign."""
    return (numbers >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word


def fake_fingerprint(tensor: Tensor) -> Tensor:
    check_fingerprint(tensor)
    return tensor.new_empty((), dtype=torch.int64)


_fingerprint = define("fingerprint", "(Tensor tensor) -> Tensor", reference_fingerprint, fake_fingerprint)
