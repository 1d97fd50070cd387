"""Models that no host has, written as the host's own are. Only scripts and commands import this package."""
