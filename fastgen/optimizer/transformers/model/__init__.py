"""Runs transformers' models over the beam tree: attention, the decoder's steps, the encoder."""
