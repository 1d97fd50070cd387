"""What the driver tells every actor."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fastgen.version import __version__


@dataclass(frozen=True)
class Job:
    """What every actor of a run is told."""

    args: argparse.Namespace
    form: str  # of the output
    version: str = __version__
