"""Generates a corpus with a model of fairseq, for the command fastgen-generate."""
