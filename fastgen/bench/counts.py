"""How much a generation calls and allocates: the same on every run, for tests that no clock can fail."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen import config

# A timing decides what is packed and which cache is planned, and what is replayed depends on the calls before.
SETTINGS: dict[str, Any] = {"packing": "off", "replay": "off"}


def settings() -> dict[str, Any]:
    """`SETTINGS`, and keys and values where a plan would choose the cache: one that was asked for stays."""
    return {**SETTINGS, "cache": "kv" if config.current().cache == "auto" else config.current().cache}


class Counts:
    """`with Counts() as counts:` around a generation that has run before under the same `settings`; see `counted`.

    Counted is what torch's dispatcher runs in this thread. A native operator of fastgen's is one, whatever it calls
    itself; so is a product, as what torch makes of a linear layer. An allocation is a storage that is in an operator's
    outputs and was not in its arguments, or has grown: what the model's code asks for, whichever allocator, or arena of
    fastgen's, serves it, and wherever that has its memory from. What an operator needs while it runs is not counted.

    fastgen runs as it does without this, in the same tier and over the same cache. Two things it leaves alone while
    somebody watches operators: it neither takes up nor keeps the recordings of other calls. Inside the block nothing is
    replayed anyway.
    """

    def __init__(self) -> None:
        self.by_operator: collections.Counter[str] = collections.Counter()
        self.allocations = 0
        self.allocated_bytes = 0

    def __enter__(self) -> Counts:
        with contextlib.ExitStack() as stack:
            stack.enter_context(config.configured(**settings()))
            stack.enter_context(_Mode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def as_dict(self) -> dict[str, int]:
        """`operators` called, `allocations`, and `allocated_bytes`: how large they were together, not at once."""
        return {
            "operators": self.by_operator.total(),
            "allocations": self.allocations,
            "allocated_bytes": self.allocated_bytes,
        }


def counted(generate: Callable[[], Any]) -> Counts:
    """The counts of `generate()` once it is warm: it is run twice, and the second is counted.

    The first fills buffers that later calls use again, and tries a model that no test has compared.
    """
    with config.configured(**settings()):
        generate()
    with Counts() as counts:
        generate()
    return counts


class _Mode(TorchDispatchMode):
    """Adds what runs inside to `counts`."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be imported to be told to keep out

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self._counts
        with self:  # in inference mode functions arrive that are made of others
            output = function.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        given = {storage._cdata: storage.nbytes() for storage in _storages((args, tuple(kwargs.values())))}
        output = function(*args, **kwargs)
        counts.by_operator[str(function)] += 1
        if function is torch.ops.aten.lift_fresh.default:
            given = {}  # made of a number, without an operator
        for identity, size in {storage._cdata: storage.nbytes() for storage in _storages(output)}.items():
            if size > given.get(identity, 0):
                counts.allocations += 1
                counts.allocated_bytes += size
        return output


def _storages(values: Any) -> Iterator[Any]:
    """Of tensors in an operator's arguments or outputs, which are in lists at most; but empty ones."""
    if isinstance(values, torch.Tensor):
        if values.layout is torch.strided and values.untyped_storage().nbytes():
            yield values.untyped_storage()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _storages(value)
