"""Slim caches for fairseq's attention."""
