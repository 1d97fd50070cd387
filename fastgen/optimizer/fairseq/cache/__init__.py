"""Slim caches for the host's attention."""
