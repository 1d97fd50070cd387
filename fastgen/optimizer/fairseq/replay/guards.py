"""Whether a model of fairseq is still what it was."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass

from fastgen.replay.guards import Host, ModelGuards

_HOST = Host(packages=("fairseq", "fastgen"), configs=(argparse.Namespace, FairseqDataclass), ignored=(Dictionary,))


def guards_of_steps(models: Iterable[Any]) -> ModelGuards:
    """Guards of what the models' steps may read: each decoder, and how the model itself normalises scores."""
    return ModelGuards([module for model in models for module in (model, *model.decoder.modules())], _HOST)
