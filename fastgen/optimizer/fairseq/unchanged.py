"""Whether a model of fairseq is still what it was."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass

from fastgen.decoding.unchanged import Host, Snapshot

_HOST = Host(configs=(argparse.Namespace, FairseqDataclass), ignored=(Dictionary,))


def snapshot(model: Any) -> Snapshot:
    """Of what the model's steps may read: all of its decoder, and how the model itself normalises scores."""
    return Snapshot([model, *model.decoder.modules()], _HOST)
