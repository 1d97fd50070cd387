"""The settings of a run of fastgen-generate besides fairseq's own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Settings:
    """fastgen's own flags; `fastgen-generate --help` describes them."""

    workers: int
    resume: bool
    overwrite: bool
    refill: str
    allowed_outputs: str | None = None  # a file that lists them, one a line
    stream: bool = False  # standard input is answered on standard output
    auto: list[str] = field(default_factory=list)  # which of "batch_size" and "max_tokens" is found by doubling
