"""Generation for corpora on many machines, on Ray Data: `pip install 'fastgen[ray]'`."""

from fastgen.distributed.dataset import generate

__all__ = ["generate"]
