"""The data that the driver sends to every actor."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.pipeline.transformers.settings import RunSettings
from fastgen.version import __version__


@dataclass(frozen=True)
class Job:
    """The settings of a run, for its actors."""

    settings: RunSettings
    form: str  # form of the output
    version: str = __version__
