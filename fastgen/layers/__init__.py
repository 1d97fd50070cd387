"""Computes single layers faster: attention of beams, and linear layers."""
