"""The host's models over the beam tree: attention, the decoder's steps, the encoder."""
