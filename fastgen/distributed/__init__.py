"""Generates corpora on many machines, with Ray; needs the extra `ray`."""

from fastgen.distributed.dataset import generate

__all__ = ["generate"]
