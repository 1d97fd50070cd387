"""Searches that choose the next tokens; the rules of each host are policies."""
