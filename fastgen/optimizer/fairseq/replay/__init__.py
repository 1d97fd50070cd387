"""Decode steps of fairseq's models that are captured once and replayed, and the state of captured steps."""
