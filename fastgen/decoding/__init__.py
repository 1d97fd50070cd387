"""Search over the next tokens; each host's own rules are policies."""
