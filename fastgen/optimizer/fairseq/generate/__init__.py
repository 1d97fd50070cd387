"""Decoding loops over the beam tree, the host's and ours, for one call and for several calls at once."""
