"""Architectures that no host has, as models of transformers: its own `generate` runs them, and fastgen faster."""
