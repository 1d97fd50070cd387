"""Generation for corpora on many machines, on Ray, from the extra `ray`."""

from fastgen.distributed.dataset import generate

__all__ = ["generate"]
