"""A plugin of pytest: writes what the native operators got and gave, for `replay.cpp`. See README.md.

$FASTGEN_CALLS names the file. Up to 700 calls of each operator, with up to 1 MiB of tensors each. All numbers are
little-endian; a text is its length in 4 bytes, and its bytes.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.ops.operator import OPERATORS

MOST_CALLS, MOST_BYTES = 700, 1 << 20
# In this order, also in replay.cpp.
TYPES = [torch.float32, torch.int64, torch.int32, torch.int8, torch.bfloat16, torch.bool, torch.float16]
NONE, TENSOR, INTEGER, REAL, BOOLEAN, TENSORS = range(6)
OPTIONAL = 0x80
NOT_IN_THE_LIBRARY = {"multinomial"}  # csrc/runtime


def text(words: str) -> bytes:
    return struct.pack("<I", len(words)) + words.encode()


def tensor(given: Tensor) -> bytes:
    """Type, sizes, strides, and the bytes from the first number to the last."""
    pairs = zip(given.shape, given.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs) if given.numel() else 0
    flat = given.detach().as_strided((span,), (1,), given.storage_offset()).clone()
    data = flat.view(torch.uint8).numpy().tobytes() if span else b""
    shape = struct.pack(f"<{2 * given.dim()}q", *given.shape, *given.stride())
    return struct.pack("<iI", TYPES.index(given.dtype), given.dim()) + shape + struct.pack("<Q", len(data)) + data


def argument(value: Any, schema: Any) -> bytes:
    optional = OPTIONAL if isinstance(schema.type, torch.OptionalType) else 0
    if value is None:
        return struct.pack("<B", NONE)
    if isinstance(value, Tensor):
        return struct.pack("<B", TENSOR | optional) + tensor(value)
    if isinstance(value, list):
        return struct.pack("<BI", TENSORS, len(value)) + b"".join(map(tensor, value))
    if isinstance(value, bool):
        return struct.pack("<BB", BOOLEAN, value)
    if schema.type.kind() == "FloatType":
        return struct.pack("<Bd", REAL, value)
    return struct.pack("<Bq", INTEGER, value)


def result(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return struct.pack("<B", TENSOR) + tensor(value)
    return struct.pack("<Bq", BOOLEAN if isinstance(value, bool) else INTEGER, value)


class Recorder(TorchDispatchMode):
    """Writes the calls of one test."""

    def __init__(self, file: IO[bytes], counts: Counter[str]) -> None:
        super().__init__()
        self.file, self.counts = file, counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("fastgen::")
        schema = function._schema.arguments
        values = [*args, *(kwargs.get(each.name, each.default_value) for each in schema[len(args) :])]
        if function.namespace != "fastgen" or not self.is_wanted(name, values):
            return function(*args, **kwargs)
        given = [argument(*pair) for pair in zip(values, schema, strict=True)]
        found = function(*args, **kwargs)  # an error writes nothing
        for i, value in enumerate(values):
            if isinstance(value, Tensor):  # what the operator has made of it
                is_changed = schema[i].alias_info is not None and schema[i].alias_info.is_write
                given[i] += struct.pack("<B", is_changed) + (tensor(value) if is_changed else b"")
        results = () if found is None else found if isinstance(found, (tuple, list)) else (found,)
        counted = struct.pack("<I", len(values)) + b"".join(given) + struct.pack("<I", len(results))
        self.file.write(text(name) + counted + b"".join(map(result, results)))
        self.counts[name] += 1
        return found

    def is_wanted(self, name: str, values: list[Any]) -> bool:
        tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
        tensors = [one for one in tensors if isinstance(one, Tensor)]
        is_plain = all(type(one) in (Tensor, torch.nn.Parameter) and one.dtype in TYPES for one in tensors)
        is_here = all(one.device.type == "cpu" for one in tensors) and name not in NOT_IN_THE_LIBRARY
        size = sum(one.numel() * one.element_size() for one in tensors)
        return is_plain and is_here and size <= MOST_BYTES and self.counts[name] < MOST_CALLS


FILE = open(os.environ["FASTGEN_CALLS"], "wb")  # noqa: SIM115  (for as long as the process runs)
COUNTS: Counter[str] = Counter()
SCHEMAS = [name + one.schema for name, one in OPERATORS.items() if name not in NOT_IN_THE_LIBRARY]
FILE.write(struct.pack("<I", len(SCHEMAS)) + b"".join(map(text, SCHEMAS)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with Recorder(FILE, COUNTS):
        yield


def pytest_sessionfinish() -> None:
    FILE.close()
