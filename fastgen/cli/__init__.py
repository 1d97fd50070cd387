"""The command lines: fastgen-demo and friends."""
