"""Captures what a function does to a CUDA device as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(graph: torch.cuda.CUDAGraph, function: Callable[[], Any], device: torch.device) -> Any:
    """Capture `function` in `graph` on a stream of its own; returns what it returns, with no valid numbers yet.

    Not `torch.cuda.graph`, which empties the allocator's cache and collects garbage first: milliseconds each.

    Raises:
        RuntimeError: for an operation that cannot be captured, such as waiting for the device.
    """
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # What other threads do meanwhile is not checked, and does not end the capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    current.wait_stream(aside)
    return result
