"""Adapters, one for each host: the only code that imports a host."""
