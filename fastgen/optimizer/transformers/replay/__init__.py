"""Which calls replay their decode steps, and what those read and write."""
