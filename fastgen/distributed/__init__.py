"""Generation for corpora on many machines, on Ray: `pip install 'fastgen[ray]'`."""

from fastgen.distributed.dataset import generate

__all__ = ["generate"]
