"""Memory that outlives a call: how much may be kept, and who keeps it."""
