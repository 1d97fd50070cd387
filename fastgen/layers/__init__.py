"""How one layer is computed faster: attention of beams, and linear layers."""
