"""The data that the driver sends to every actor."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen import config
from fastgen.pipeline.transformers.settings import RunSettings
from fastgen.version import __version__


@dataclass(frozen=True)
class Job:
    """The settings of a run, for its actors."""

    settings: RunSettings
    form: str  # form of the output
    version: str = __version__
    weights: str = field(default_factory=lambda: config.current().weights)  # the driver's, whatever a node's is
