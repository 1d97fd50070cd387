"""The host's loops and ours over the beam tree, and what they call at each step."""
