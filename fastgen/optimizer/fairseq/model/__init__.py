"""Runs fairseq's models over the beam tree: attention, decoder, encoder."""
