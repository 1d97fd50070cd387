"""An asynchronous pipeline for offline generation: read, generate, post-process in workers, write in order.

Nothing in this package imports a host or torch at import time, so that spawned workers start quickly.
"""

from __future__ import annotations

from fastgen.pipeline.errors import DONE, INPUT_ERROR, INTERRUPTED, InputError, WorkerError
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

__all__ = ["DONE", "INPUT_ERROR", "INTERRUPTED", "InputError", "WorkerError", "WorkerPool", "run_stages"]
