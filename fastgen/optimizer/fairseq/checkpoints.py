"""Loads fairseq's checkpoints under torch >= 2.6, which by default loads only tensors and listed classes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastgen import locks

# Plain holders of options and state: a checkpoint may have them built, and no other code runs.
# A module that isn't loaded can't be needed: its classes would have to come from this process's fairseq.
_LISTED = {
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.nodes": (
        "AnyNode",
        "BooleanNode",
        "EnumNode",
        "FloatNode",
        "IntegerNode",
        "StringNode",
    ),
    "fairseq.data.dictionary": ("Dictionary",),
    "fairseq.meters": ("AverageMeter", "StopwatchMeter", "TimeMeter"),
    "fairseq.logging.meters": ("AverageMeter", "StopwatchMeter", "SumMeter", "TimeMeter"),
}
_NUMBERS = ("float64", "float32", "float16", "int64", "int32", "bool")
_lock = locks.reentrant_lock()


def loading(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`stock`, with the classes of fairseq's checkpoints on torch's allow-list while it runs."""

    @functools.wraps(stock)
    def load_checkpoint_to_cpu(*args: Any, **kwargs: Any) -> Any:
        with allowed():
            return stock(*args, **kwargs)

    return load_checkpoint_to_cpu


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Allow the classes inside the block, one load at a time: the list, and omegaconf's state, are the process's."""
    with _lock:
        theirs = torch.serialization.get_safe_globals()  # the user's classes, which stay on the list
        with torch.serialization.safe_globals([each for each in _classes() if each not in theirs]):
            yield


def _classes() -> list[Any]:
    found: list[Any] = [argparse.Namespace, collections.defaultdict, collections.OrderedDict, dict, list, int, Any]
    for module, names in _LISTED.items():
        loaded = sys.modules.get(module)
        found += [vars(loaded)[name] for name in names if loaded is not None and name in vars(loaded)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # losses and scores are numbers of NumPy 1 or 2 at times
        scalar = numpy.float64(0).__reduce__()[0]
        found += [numpy.dtype, *(type(numpy.dtype(kind)) for kind in _NUMBERS)]
        found += [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    constants = sys.modules.get("fairseq.dataclass.constants")
    if constants is not None:  # the enumerations of the command line's choices
        found += [value for value in vars(constants).values() if isinstance(value, type)]
    return found
