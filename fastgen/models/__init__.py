"""Models that no host has, in the host's own form. Nothing here is imported unless a script or a command does."""
