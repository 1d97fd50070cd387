"""The limits of a service, in a module that imports nothing heavy, so that a command can show the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits that a request must not exceed."""

    body_bytes: int = 1 << 20
    inputs: int = 64
    input_tokens: int = 4096  # besides the model's own limit
    new_tokens: int = 1024
    beams: int = 16  # and samples
    rows: int = 256  # rows, beams of all inputs, that decode together
    seconds: float = 120.0
    receive_seconds: float = 30.0  # for a request's head, and for its body
    receiving: int = 256  # bodies that a replica receives at the same time
    connections: int = 1024  # of a machine's proxy
