"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What the engine has done since it started; `running` and `queued` are current numbers."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0  # because the queue was full
    expired: int = 0  # past the deadline
    cancelled: int = 0  # because the client is gone
    freed_rows: int = 0  # rows that left a batch early, as the request was expired or cancelled
    inputs: int = 0
    tokens: int = 0  # generated tokens
    steps: int = 0
    rows: int = 0  # summed over the steps: rows / steps decode together
    running: int = 0  # rows in the batches
    queued: int = 0  # inputs that wait
