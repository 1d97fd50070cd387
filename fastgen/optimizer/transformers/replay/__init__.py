"""Replayed decode steps of transformers' models: which calls have them, and the state of captured steps."""
