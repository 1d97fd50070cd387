"""fairseq's checkpoints under torch >= 2.6, which loads nothing but tensors and listed classes by default."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Plain holders of options and state; what a checkpoint names of them is built, and no other code runs.
# A module that isn't loaded can't be needed: its classes would have to come from this very process' fairseq.
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
_lock = threading.Lock()
_loading: list[Any] = []  # the one open `safe_globals`, and how many loads share it
_users = 0


def loading(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`stock`, with the classes of fairseq's checkpoints on torch's allow-list while it runs."""

    @functools.wraps(stock)
    def load_checkpoint_to_cpu(*args: Any, **kwargs: Any) -> Any:
        with _allowed():
            return stock(*args, **kwargs)

    return load_checkpoint_to_cpu


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """The list is one for the process: of loads that overlap, the first opens it and the last closes it."""
    global _users
    with _lock:
        if not _users:
            context = torch.serialization.safe_globals(_classes())
            context.__enter__()
            _loading.append(context)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _loading.pop().__exit__(None, None, None)


def _classes() -> list[Any]:
    found: list[Any] = [argparse.Namespace, collections.defaultdict, collections.OrderedDict, dict, list, int, Any]
    for module, names in _LISTED.items():
        loaded = sys.modules.get(module)
        found += [vars(loaded)[name] for name in names if loaded is not None and name in vars(loaded)]
    constants = sys.modules.get("fairseq.dataclass.constants")
    if constants is not None:  # the enumerations of the command line's choices
        found += [value for value in vars(constants).values() if isinstance(value, type)]
    return found
