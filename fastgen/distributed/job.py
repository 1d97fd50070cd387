"""What the driver tells every actor."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.pipeline.transformers.settings import RunSettings
from fastgen.version import __version__


@dataclass(frozen=True)
class Job:
    """What every actor of a run is told."""

    settings: RunSettings
    form: str  # of the output
    version: str = __version__
