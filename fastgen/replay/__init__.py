"""A decode step captured once and replayed."""
