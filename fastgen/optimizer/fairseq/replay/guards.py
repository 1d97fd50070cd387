"""Guards that tell whether a model of fairseq is still as it was when steps were captured."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass

from fastgen.replay.guards import Host, ModelGuards

_HOST = Host(packages=("fairseq", "fastgen"), configs=(argparse.Namespace, FairseqDataclass), ignored=(Dictionary,))


def guards_of_steps(models: Iterable[Any]) -> ModelGuards:
    """Guards of all that the models' steps may read: the decoders, and the models, which normalise scores."""
    return ModelGuards([module for model in models for module in (model, *model.decoder.modules())], _HOST)
