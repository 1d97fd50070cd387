"""What a client is told of an error that a model, or the host, has raised."""

from __future__ import annotations

import torch

from fastgen.memory.limits import is_out_of_memory
from fastgen.pipeline.batching import release_memory
from fastgen.pipeline.errors import first_line
from fastgen.serving.generation_request import Failed


def failed_by(error: Exception) -> Failed:
    """The end of a request that this error ends; what is free of a full memory is released."""
    if is_out_of_memory(error):
        release_memory()
        return Failed(503, "The memory is full: send fewer or shorter inputs, or send them again later.")
    if isinstance(error, (ValueError, ArithmeticError)):
        return Failed(422, f"transformers refuses to generate: {first_line(error)}.")
    return Failed(500, f"The model failed with {type(error).__name__}: {first_line(error)}.")


def is_lost(failed: Failed, device: torch.device) -> bool:
    """Whether this failure has left a device that only returns errors to this process, as some do with a GPU."""
    return failed.status == 500 and not _answers(device)


def _answers(device: torch.device) -> bool:
    try:
        return bool(torch.zeros(1, device=device).item() == 0)
    except Exception:
        return False
