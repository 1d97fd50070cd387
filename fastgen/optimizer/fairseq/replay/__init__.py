"""Decode steps that are captured once and replayed, and what those read and write."""
