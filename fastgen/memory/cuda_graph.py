"""Captures what a function does to a CUDA device as a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastgen import locks

_capturing = locks.lock()  # one at a time: they share a stream, and exchange the generator's state
_streams: dict[torch.device, torch.cuda.Stream] = {}  # a stream for each would have libraries' workspaces of its own


def capture(graph: torch.cuda.CUDAGraph, function: Callable[[], Any], device: torch.device) -> Any:
    """Capture `function`, which draws no random numbers, and return what it returns, with no valid numbers yet.

    Not `torch.cuda.graph`, which empties the allocator's cache and collects garbage first: milliseconds each.

    Raises:
        RuntimeError: for an operation that cannot be captured, such as waiting for the device.
    """
    with _capturing:
        aside = _streams.get(device)
        if aside is None:
            aside = _streams[device] = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            with _other_random_state(device):
                # What other threads do meanwhile is not checked, and does not end the capture.
                graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        current.wait_stream(aside)
        return result


@contextlib.contextmanager
def _other_random_state(device: torch.device) -> Iterator[None]:
    """Inside the block, the device's default generator has a copy of the random state in place of the state itself.

    In many versions of torch a capture takes possession of the state that it begins with, until it ends: other threads
    that draw random numbers on the device meanwhile would get an error.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
