"""The host's loop and ours over the beam tree, alone and several at once."""
