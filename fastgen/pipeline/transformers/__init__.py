"""Generates a corpus with a model of transformers, for the command fastgen-generate-transformers."""
