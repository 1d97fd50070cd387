"""The beam tree as the host's cache, and slim caches for the host's attention."""
