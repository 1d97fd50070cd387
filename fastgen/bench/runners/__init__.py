"""What a side's process does: loads a task's model, and decodes all of its inputs as often as it is asked to."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Protocol

WITHOUT_TORCH = ("ctranslate2", "llamacpp", "openvino")  # beside their own threads torch's are in the way


class Refused(Exception):
    """This side cannot do the task; the message is one sentence for the reader."""


class Missing(Refused):
    """It is not installed: nothing is wrong."""


class Runner(Protocol):
    def __init__(self, order: dict[str, Any]) -> None:
        """`order`: task, side's options, folders, device, dtype and threads."""

    def versions(self) -> dict[str, str]: ...

    def generate(self) -> Any:
        """Decode everything once; this call is timed."""

    def outputs(self, generated: Any) -> dict[str, Any]:
        """What `generate` returned, for comparison: `tokens` (the best of each input, new tokens
        without the end); `rows` and `scores` where they are there."""


def place(sizes: Iterable[int], number: int) -> tuple[int, slice]:
    """The batch that has the input of this number, of batches of these sizes, and its row there."""
    for batch, size in enumerate(sizes):
        if number < size:
            return batch, slice(number, number + 1)
        number -= size
    raise IndexError("there is no such input")


def runner(order: dict[str, Any]) -> Runner:
    name = order["runner"]
    made: Runner = importlib.import_module(f"fastgen.bench.runners.{name}").Runner(order)
    return made
