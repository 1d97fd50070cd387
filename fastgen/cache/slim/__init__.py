"""Slim caches: one vector stored for each position, from which keys and values of all heads follow."""
